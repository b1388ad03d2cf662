"""A block of steps that finds no room is lost, and nothing else: later items are right."""

import collections

import numpy as np
import pytest
import tree
from adder_steps import FIRST, LAST, MID, TABLE, make_client, observations, read, stacked_episodes, step

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


def play(make, failing=None):
    """Returns the items of three envs and 60 steps, and how often a call failed."""
    client = make_client()
    adder = make(client)
    append, calls, errors = adder._writer.append, 0, 0

    def limited(*arguments):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise replay.StoreFullError("no room")
        return append(*arguments)

    adder._writer.append = limited
    for t, (action, timestep, extras) in enumerate(stacked_episodes(60)):
        try:
            if t == 0:
                adder.add_first(timestep)
            else:
                adder.add(action, timestep, extras)
        except replay.StoreFullError:
            errors += 1
    adder.flush()
    items = [b"".join(np.asarray(leaf).tobytes() for leaf in tree.flatten(item)) for item in read(client)]
    dropped = adder.num_dropped_episodes
    assert adder.close() == 0
    assert all(stream.num_rows == 0 for stream in client.store.streams.values())
    return items, errors, dropped


@pytest.mark.parametrize("name", MAKERS)
def test_the_other_items_are_those_of_an_adder_that_lost_nothing(name, monkeypatch):
    monkeypatch.setattr(block, "_MAX_BLOCK_STEPS", 5)
    every, errors, uncounted = play(MAKERS[name])
    assert errors == 0
    # Of 60 steps a block has 5, and the windows that reach into it a few more.
    most = len(every) - len(every) // 3
    for failing in range(1, 10):
        items, errors, dropped = play(MAKERS[name], failing)
        assert errors == 1
        left = collections.Counter(every)
        left.subtract(items)
        assert min(left.values()) == 0, "an item that no adder should write"
        assert [item for item in every if item in set(items)] == items, "the order"
        assert len(items) >= most
        assert items[-1] == every[-1]
        assert uncounted < dropped <= uncounted + 6


def test_an_episode_that_loses_several_blocks_counts_once(monkeypatch):
    monkeypatch.setattr(block, "_MAX_BLOCK_STEPS", 5)
    for make in (MAKERS["1 step"], MAKERS["episodes"]):
        client = make_client()
        adder = make(client)
        append = adder._writer.append

        def full(*arguments):
            raise replay.StoreFullError("no room")

        adder.add_first(step(FIRST, 0))
        for i in range(1, 40):
            adder._writer.append = full if i < 20 else append
            try:
                adder.add(0, step(LAST if i % 10 == 9 else MID, i) if i % 10 else step(FIRST, i))
            except replay.StoreFullError:
                assert i % 5 == 0
        adder.flush()
        assert adder.num_dropped_episodes == 2
        assert observations(client)[-1][-1] == 39
