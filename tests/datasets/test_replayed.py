"""Episodes that come back from the replay tables of a checkpoint."""

import functools
from pathlib import Path

import numpy as np
import pytest
import tree

from framework import adders, replay, specs
from framework.checkpoints import Checkpointer
from framework.datasets import episodes
from framework.datasets.replayed import replayed
from framework.replay.checkpointers import DefaultCheckpointer
from framework.replay.selectors import Fifo


def episode(length, first, truncated, stacked):
    """An episode whose values name their time step; observations are nests, or a stack of 3 frames."""
    numbers = first + np.arange(length + 1)
    observation = {"a": np.stack([numbers, -numbers], 1).astype(np.float32), "b": (numbers, numbers * 0.5)}
    if stacked:
        frames = np.concatenate([[first, first], numbers])[:, None].astype(np.uint8)
        observation = np.stack([frames[t : t + 3] for t in range(length + 1)])
    discount = np.ones(length, np.float32)
    discount[-1] = truncated
    action = {"move": numbers[:-1] % 5, "turn": numbers[:-1, None].astype(np.float32)}
    return episodes.step_of(observation, action, numbers[:-1].astype(np.float32), discount)


def written(stacked=False):
    """Episodes of several lengths, every second one truncated, and their spec."""
    made = [episode(n, 20 * i, bool(i % 2), stacked) for i, n in enumerate((3, 1, 7, 2, 6))]
    spec = episodes.plain_spec(made[0])
    return made, spec._replace(observations=specs.StackedArray((3, 1), np.uint8)) if stacked else spec


def make_adder(kind, spec, client):
    if isinstance(kind, int):
        frames = specs.frame_stack(spec.observations)
        return adders.NStepTransitionAdder(client, kind, 0.9, frame_stack=frames)
    length, end = kind
    return adders.SequenceAdder(client, length, length - 1, end, observation_spec=spec.observations)


def write(path, kind, made, spec, max_size=1000):
    """Plays episodes into a table; returns a client of it and its checkpoint."""
    table = replay.Table("replay", Fifo(), Fifo(), max_size, replay.rate_limiters.MinSize(1))
    client = replay.EmbeddedClient([table], checkpointer=DefaultCheckpointer(path))
    episodes.play(made, functools.partial(make_adder, kind, spec, client))
    return client, Checkpointer(path).restore(Path(client.checkpoint()))


def shown(nest):
    return str(tree.map_structure(lambda leaf: np.asarray(leaf).tolist(), nest))


def items(client):
    size = client.server_info()["replay"].current_size
    found = client.sample_batch("replay", size, pad=True).data
    return sorted(shown(tree.map_structure(lambda leaf, at=at: leaf[at], found)) for at in range(size))


SEQUENCES = [(length, end) for length in (2, 4) for end in ("zero_pad", "truncate", "write", "continue")]


@pytest.mark.parametrize("stacked", [False, True], ids=["nests", "stack"])
@pytest.mark.parametrize("kind", [1, *SEQUENCES], ids=str)
def test_episodes_and_their_items_come_back_as_they_were_written(tmp_path, monkeypatch, kind, stacked):
    (made, spec), end = written(stacked), kind if kind == 1 else kind[1]
    if end == "continue":
        monkeypatch.setattr(episodes, "_STREAMS", 1)  # One env plays them one after the other.
    client, reader = write(tmp_path / "first", kind, made, spec)
    found = replayed([reader], spec)
    found.check(spec)
    shortest = kind[0] - 1 if end == "write" else 1  # WRITE drops shorter ones.
    expected = {shown(each[:5]) for each in made if len(each.reward) > shortest}
    if end == "continue":  # No item has all of the last one's rows.
        expected.remove(shown(made.pop()[:5]))
        assert {shown(each[:5]) for each in found[:-1]} == expected
        return
    assert sorted(shown(each[:5]) for each in found) == sorted(expected)
    assert items(write(tmp_path / "again", kind, found, spec)[0]) == items(client)


def test_what_a_full_table_still_has_comes_back(tmp_path):
    """The first transitions are gone, and an episode whose end is not there is truncated."""
    made, spec = written()
    client, reader = write(tmp_path / "first", 1, made[:3], spec, max_size=6)
    found = replayed([reader], spec)
    assert found.num_steps == 6 and max(found.lengths) == 5
    assert items(write(tmp_path / "again", 1, found, spec)[0]) == items(client)
    newest = replayed([reader], spec, last=1)
    assert len(newest) == 1 and shown(newest[0]) == shown(found[-1])


def test_each_server_has_a_part(tmp_path):
    made, spec = written()
    readers = [write(tmp_path / str(at), 1, made[at::2], spec)[1] for at in range(2)]
    assert sorted(shown(each[:5]) for each in replayed(readers, spec)) == sorted(
        shown(each[:5]) for each in made
    )


def test_what_is_no_episode_is_an_error(tmp_path):
    made, spec = written()
    _, reader = write(tmp_path / "sums", 3, made, spec)
    with pytest.raises(ValueError, match="n_step 3, expected 1: sums of rewards"):
        replayed([reader], spec, n_step=3)
    table = replay.Table.queue("queue", 10)
    client = replay.EmbeddedClient([table], checkpointer=DefaultCheckpointer(tmp_path / "queue"))
    reader = Checkpointer(tmp_path / "queue").restore(Path(client.checkpoint()))
    with pytest.raises(ValueError, match=r"got the tables \['queue'\], expected 'replay'"):
        replayed([reader], spec)


def outcome(achieved, desired):
    return -(achieved != desired)[:, 0].astype(np.float32), np.zeros(len(desired), np.bool_)


def test_items_of_hindsight_are_left_out(tmp_path):
    places = np.arange(5, dtype=np.float32)[:, None]
    observation = {"achieved_goal": places, "desired_goal": places * 0 + 3, "observation": places}
    made = episodes.step_of(observation, np.ones(4, np.int64), np.float32([-1, -1, 0, -1]), np.ones(4, "f4"))
    spec = episodes.plain_spec(made)
    table = replay.Table("replay", Fifo(), Fifo(), 100, replay.rate_limiters.MinSize(1))
    client = replay.EmbeddedClient([table], checkpointer=DefaultCheckpointer(tmp_path))
    episodes.play([made], lambda: adders.HindsightAdder(client, 1, 0.9, outcome, num_goals=2), client)
    assert client.server_info()["replay"].current_size == 12
    (found,) = replayed([Checkpointer(tmp_path).restore(Path(client.checkpoint()))], spec)
    assert shown(found[:5]) == shown(made[:5])
