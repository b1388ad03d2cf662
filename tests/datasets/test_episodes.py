"""Episodes in files, in both layouts, and as items of replay."""

import functools

import numpy as np
import pytest
import tree
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.bc import BC, BCConfig
from agents.dqn import DQN, DQNConfig
from framework import adders, environments, replay, specs
from framework.datasets import EpisodeDataset, npz_layout, read_episodes, record, write_episodes
from framework.datasets.demonstrations import fill
from framework.datasets.episodes import play
from framework.environments.testing import EchoEnvironment, FakeEnvironment, make_spec
from framework.runs import recorded_specs
from framework.types import Step


def echo(count=2, **options):
    """Episodes of three steps of an environment whose reward names the observation and the action."""
    environment = environments.make(EchoEnvironment, num_envs=1, options={"episode_length": 3, **options})
    actions = iter(range(1000))
    return list(record(environment, lambda observation: np.array([next(actions) % 4]), count))


def nested(num_episodes=3):
    pair = (specs.Array((), np.uint8),) * 2
    observations = {"a": specs.Array((2,), np.float32), "b": pair}
    spec = make_spec(observations=observations)
    environment = environments.make(functools.partial(FakeEnvironment, spec, episode_length=4), num_envs=1)
    return spec, list(record(environment, lambda observation: np.array([1]), num_episodes))


def same(one, other):
    for left, right in zip(one, other, strict=True):
        tree.map_structure(np.testing.assert_array_equal, left[:5], right[:5])


@pytest.mark.parametrize("layout", ["npz", "minari"])
def test_a_folder_holds_nests_and_says_what_it_holds(tmp_path, layout):
    if layout == "minari":
        pytest.importorskip("minari", reason="needs the extra minari, which needs NumPy 2")
    spec, episodes = nested()
    about = {"algorithm_name": "a script"}
    path = write_episodes(tmp_path / "data-v0", iter(episodes), layout=layout, spec=spec, about=about)
    found = read_episodes(path)
    same(episodes, found)
    assert found.num_steps == 12 and found.lengths.tolist() == [4, 4, 4]
    assert found.about["algorithm_name"] == "a script"
    found.check(spec)
    again = read_episodes(write_episodes(tmp_path / "again", found))  # From one to the other.
    same(episodes, again)
    assert again.about["algorithm_name"] == "a script"


def test_shards_are_mapped_and_begin_when_one_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(npz_layout, "_SHARD", 100)
    path = write_episodes(tmp_path / "data", echo(7))
    assert len(list(path.glob("episodes-*.npz"))) > 2
    found = read_episodes(path)
    same(echo(7), found)
    assert isinstance(found[0].observation.base, np.memmap)
    assert [len(each.reward) for each in found[-2:]] == [4, 4]
    with pytest.raises(IndexError, match="has 7"):
        found[7]


def test_each_frame_of_a_stack_is_stored_once(tmp_path):
    spec = make_spec(observations=specs.StackedBoundedArray((3, 2), np.uint8, 0, 255))
    frames = np.arange(14, dtype=np.uint8).reshape(7, 2)  # Five rows of three frames.
    stacks = np.stack([frames[t : t + 3] for t in range(5)])
    numbers = np.zeros(5, np.float32)
    starts = np.arange(5) == 0
    episode = Step(stacks, np.zeros(5, np.int64), numbers, numbers, starts)
    path = write_episodes(tmp_path / "data", [episode, episode], spec=spec)
    with np.load(path / "episodes-00000.npz") as file:
        assert file["observation"].shape == (14, 2)
    found = read_episodes(path)
    same([episode, episode], found)
    assert isinstance(found.spec.observations, specs.StackedBoundedArray)


def test_compressed_arrays_are_smaller_and_the_same(tmp_path):
    made, sizes = echo(1, episode_length=1000), []
    for compress in (False, True):
        path = write_episodes(tmp_path / str(compress), made, compress=compress)
        sizes.append((path / "episodes-00000.npz").stat().st_size)
        same(made, read_episodes(path))
    assert sizes[1] < sizes[0] / 2


def test_specs_come_back_from_a_file(tmp_path):
    spec, episodes = nested()
    found = read_episodes(write_episodes(tmp_path / "data", episodes, spec=spec)).spec
    assert recorded_specs.whole(found) == recorded_specs.whole(spec)
    assert isinstance(found.actions, specs.DiscreteArray) and isinstance(found.observations["b"], tuple)


def test_episodes_of_another_environment_are_an_error(tmp_path):
    _, episodes = nested()
    data = read_episodes(write_episodes(tmp_path / "data", episodes))
    with pytest.raises(ValueError, match=r"episode 0: got the observation .*uint8.*, expected .*float32"):
        data.check(make_spec())
    episodes[1] = episodes[1]._replace(reward=episodes[1].reward.astype(np.float64))
    with pytest.raises(ValueError, match=r"episode 1: got the reward float64\[5\], expected float32\[5\]"):
        write_episodes(tmp_path / "other", episodes)
    assert {path.name for path in tmp_path.iterdir()} == {"data"}


def test_a_function_is_a_source():
    episodes = read_episodes(f"{__name__}:echo(count=3)")
    assert len(episodes) == 3 and isinstance(episodes[0], Step)
    with pytest.raises(ValueError, match="expected at least one"):
        read_episodes(f"{__name__}:echo(count=0)")
    with pytest.raises(ValueError, match="cannot be imported"):
        read_episodes("no_module:episodes")


def test_wrong_arguments_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"'.*none', which is not a folder with manifest.json nor data/meta"):
        read_episodes(tmp_path / "none")
    with pytest.raises(ValueError, match=r"has neither manifest\.json nor data/metadata\.json"):
        read_episodes(tmp_path)
    with pytest.raises(ValueError, match="layout: got 'csv', expected one of npz, minari"):
        write_episodes(tmp_path / "a", echo(), layout="csv")
    with pytest.raises(ValueError, match="compress: got True with layout 'minari'"):
        write_episodes(tmp_path / "a", echo(), layout="minari", compress=True)
    with pytest.raises(FileExistsError, match=r"exists\. Write the episodes to a new folder"):
        write_episodes(tmp_path, echo())
    with pytest.raises(ValueError, match="episodes: got none"):
        write_episodes(tmp_path / "a", [])
    assert not list(tmp_path.iterdir())


def altered(path, **changes):
    file = path / "episodes-00000.npz"
    with np.load(file) as arrays:
        arrays = {**arrays, **changes}
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": None}, r"00000\.npz: got the arrays \['action', .*, expected .*'reward'"),
        (
            {"reward": np.zeros(5, np.float32)},
            r"reward: got float32\[5\], expected float32\[6\] of 2",
        ),
        ({"action": np.zeros(6)}, r"action: got float64\[6\], expected int(32|64)\[6\]"),
        ({"lengths": np.array([6])}, r"action: got .* of 2 episodes"),
    ],
)
def test_files_of_another_form_say_field_got_and_expected(tmp_path, changes, message):
    path = write_episodes(tmp_path / "data", echo())
    altered(path, **changes)
    with pytest.raises(ValueError, match=message):
        read_episodes(path)


@pytest.mark.parametrize("kept", [0, 300, 0.99])
def test_a_file_that_is_cut_off_is_an_error(tmp_path, kept):
    file = write_episodes(tmp_path / "data", nested()[1]) / "episodes-00000.npz"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if kept < 1 else kept])
    with pytest.raises(ValueError, match=r"00000\.npz: got a file that cannot be read .*write or copy it"):
        read_episodes(file.parent)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "spec": {}}'])
def test_a_broken_manifest_is_an_error(tmp_path, text):
    path = write_episodes(tmp_path / "data", echo())
    (path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        read_episodes(path)


def make_adder(kind, client):
    if kind == "sequence":
        return adders.SequenceAdder(client, 3, 2, end_of_episode_behavior="truncate")
    return adders.NStepTransitionAdder(client, int(kind), 0.9)


def items_of(client):
    table = client.server_info()["replay"]
    found = client.sample_batch("replay", table.current_size, pad=True).data
    rows = zip(*[np.reshape(leaf, (len(leaf), -1)).tolist() for leaf in tree.flatten(found)], strict=True)
    return sorted(map(str, rows))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.sampled_from(["1", "3", "sequence"]))
def test_items_are_those_that_actors_would_have_written(lengths, kind):
    """Whatever the lengths, and whichever env plays an episode."""
    played, acted = (replay.EmbeddedClient([replay.Table.queue("replay", 1000)]) for _ in range(2))
    play(numbered(lengths), functools.partial(make_adder, kind, played))
    act(make_adder(kind, acted), lengths)
    assert items_of(played) == items_of(acted)


def numbered(lengths):
    """Episodes of these lengths, every second one truncated."""
    return [
        echo(1, episode_length=length, first=100 * number, truncate=bool(number % 2))[0]
        for number, length in enumerate(lengths)
    ]


def act(adder, lengths):
    """Writes the same as an actor does."""
    for number, length in enumerate(lengths):
        options = {"episode_length": length, "first": 100 * number, "truncate": bool(number % 2)}
        environment = environments.make(EchoEnvironment, num_envs=1, options=options)
        adder.add_first(environment.reset())
        for step in range(length):
            action = np.array([step % 4])
            adder.add(action, environment.step(action))
    adder.close()


AGENTS = {
    "1 step": DQN(DQNConfig(n_step=1)),
    "3 steps": DQN(DQNConfig(n_step=3)),
    "rewards up to 50": DQN(DQNConfig(n_step=2, reward_clip=50.0)),
    "sequences of 2": BC(BCConfig(recurrent="gru", unroll_length=2)),
    "sequences of 4": BC(BCConfig(recurrent="gru", unroll_length=4)),
}


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    return write_episodes(tmp_path_factory.mktemp("data") / "echo", numbered((4, 1, 6)))


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_settings_of_a_run_say_what_an_item_of_a_file_is(one_file, agent):
    data = read_episodes(one_file)
    drawn, acted = (replay.EmbeddedClient([replay.Table.queue("replay", 1000)]) for _ in range(2))
    fill(drawn, "replay", str(one_file), functools.partial(agent.make_adder, drawn))
    act(agent.make_adder(acted, data.spec), data.lengths.tolist())
    assert items_of(drawn) == items_of(acted)


def test_each_server_gets_a_part():
    clients = [replay.EmbeddedClient([replay.Table.queue("replay", 100)]) for _ in range(2)]
    sharded = replay.ShardedClient(clients, seed=0)
    play(echo(5), lambda: adders.NStepTransitionAdder(sharded, 1, 0.9), sharded)
    assert sorted(client.server_info()["replay"].current_size for client in clients) == [6, 9]


def test_only_some_episodes_are_copied_at_a_time(monkeypatch):
    read = []

    def episode(index):
        read.append(index)
        return echo(1)[0]

    client = replay.EmbeddedClient([replay.Table.queue("replay", 100)])
    monkeypatch.setattr("framework.datasets.episodes._CHUNK", 1)
    play(EpisodeDataset("many", episode, [3] * 9), lambda: adders.NStepTransitionAdder(client, 1, 0.9))
    assert read == [*range(9)] and client.server_info()["replay"].current_size == 27
