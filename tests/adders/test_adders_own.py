"""The adder that the guide shows is a whole adder."""

import itertools
import pathlib

import numpy as np
import pytest
import tree
from adder_steps import FIRST, LAST, feed, make_client, read, stacked_episodes

from framework.adders import block

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "adders.md"
SOURCE = GUIDE.read_text(encoding="utf-8").partition("## An adder of your own")[2].split("```")[1]


def make(client):
    names = {"client": client}
    exec(SOURCE.removeprefix("python"), names)
    return names["adder"]


def returns_by_hand(steps):
    """The items of each env by the time at which its episodes end, with returns summed forwards."""
    expected, open_rows = [], [[] for _ in steps[0][1].step_type]
    for (_, before, _), (action, after, _) in itertools.pairwise(steps):
        for env, rows in enumerate(open_rows):
            if after.step_type[env] == FIRST:
                continue
            rows.append((before.observation[env], action[env], after.reward[env], after.discount[env]))
            if after.step_type[env] == LAST:
                for i, (observation, chosen, *_) in enumerate(rows):
                    weights = np.cumprod([1.0] + [0.99 * discount for *_, discount in rows[i:-1]])
                    rewards = [reward for _, _, reward, _ in rows[i:]]
                    expected.append((observation.tolist(), int(chosen), float(weights @ rewards)))
                rows.clear()
    return sorted(expected)


def items_of(client):
    return sorted((i["observation"].tolist(), int(i["action"]), float(i["return"])) for i in read(client))


@pytest.mark.parametrize("largest", [1, 5, 256])
def test_monte_carlo_returns_are_those_of_whole_episodes(largest, monkeypatch):
    monkeypatch.setattr(block, "_MAX_BLOCK_STEPS", largest)
    client, steps = make_client(), list(stacked_episodes(60))
    adder = make(client)
    feed(adder, steps)
    adder.flush()
    found, expected = items_of(client), returns_by_hand(steps)
    assert len(expected) > 100
    tree.map_structure(lambda own, right: np.testing.assert_allclose(own, right, 1e-4), found, expected)
    adder.reset()
    assert adder.num_dropped_episodes == 3, "the open ones"
    assert adder.close() == 0
    assert all(stream.num_rows == 0 for stream in client.store.streams.values())
