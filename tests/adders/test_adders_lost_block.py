"""A block of steps that finds no room is lost with its episodes, and nothing else: later items are right."""

import numpy as np
import pytest
import tree
from adder_steps import TABLE, make_client, read, stacked_episodes

from framework import adders, replay, specs
from framework.adders import block

TABLES = {TABLE: None}
STACK = specs.StackedArray((2,), np.float32)
STATE = ["state"]
MAKERS = {
    "1 step": lambda client: adders.NStepTransitionAdder(client, 1, 0.9, max_delay=1e9),
    "3 steps": lambda client: adders.NStepTransitionAdder(client, 3, 0.9, max_delay=1e9),
    "one_step": lambda client: adders.NStepTransitionAdder(client, 3, 0.9, one_step=True, max_delay=1e9),
    "frames": lambda client: adders.NStepTransitionAdder(client, 2, 0.9, frame_stack=2, max_delay=1e9),
    "sequences": lambda client: adders.SequenceAdder(client, 3, 2, max_delay=1e9),
    "ragged": lambda client: adders.SequenceAdder(client, 3, 3, "TRUNCATE", max_delay=1e9),
    "states": lambda client: adders.SequenceAdder(client, 3, 2, extras_of_first_row=STATE, max_delay=1e9),
    "stacks": lambda client: adders.SequenceAdder(
        client, 3, 2, "CONTINUE", observation_spec=STACK, max_delay=1e9
    ),
    "episodes": lambda client: adders.EpisodeAdder(client, 12, max_delay=1e9),
    "padded": lambda client: adders.EpisodeAdder(client, 12, np.zeros, max_delay=1e9),
    "unrolls": lambda client: adders.UnrollAdder(client, 7, priority_fns=TABLES),
}


def play(adder):
    for t, (action, timestep, extras) in enumerate(stacked_episodes(60)):
        adder.add(action, timestep, extras) if t else adder.add_first(timestep)
    adder.flush()


def items_of(client):
    return [b"".join(np.asarray(leaf).tobytes() for leaf in tree.flatten(item)) for item in read(client)]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("failing", [1, 2, 3, 8])
def test_the_adder_goes_on_as_a_new_one(name, failing, monkeypatch):
    monkeypatch.setattr(block, "_MAX_BLOCK_STEPS", 5)
    client, other = make_client(), make_client()
    adder, calls = MAKERS[name](client), iter(range(1, 1000))
    append = adder._out.writer.append

    def limited(*arguments):
        if next(calls) == failing:
            raise replay.StoreFullError("no room")
        return append(*arguments)

    adder._out.writer.append = limited
    with pytest.raises(replay.StoreFullError):
        play(adder)
    assert 3 <= adder.num_dropped_episodes <= 6
    with pytest.raises(ValueError, match="no open episode"):
        adder.add(*list(stacked_episodes(2))[1])
    before = items_of(client)
    assert all(stream.num_rows == 0 for stream in client.store.streams.values()), "it holds none"
    play(adder)
    play(MAKERS[name](other))
    every = items_of(other)
    assert every[: len(before)] == before
    assert items_of(client) == every
    assert adder.close() == 0
    assert all(stream.num_rows == 0 for stream in client.store.streams.values())
