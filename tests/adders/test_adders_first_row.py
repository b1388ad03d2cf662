"""Extras that an item has for its first row only."""

import dm_env
import numpy as np
import pytest
import tree
from adder_steps import TABLE, feed, make_client
from dm_env import specs as dm_specs

from framework import adders, replay
from framework.environments.testing import make_spec

NUM_ENVS = 3


def steps(length=60):
    """Episodes of different lengths in each env; extras say time and env."""
    kinds, one = np.zeros(NUM_ENVS, np.int64), np.ones(NUM_ENVS, np.float32)
    for t in range(length):
        state = np.float32(100 * t + np.arange(NUM_ENVS)[:, None] + np.zeros((NUM_ENVS, 2)))
        extras = {"log_prob": -one * t, "state": (state, {"age": np.full(NUM_ENVS, t)})}
        timestep = dm_env.TimeStep(kinds, one, one, np.full((NUM_ENVS, 3), t, np.float32))
        yield np.zeros(NUM_ENVS, np.int64), timestep, extras
        kinds = np.where(kinds == 2, 0, np.where((t + np.arange(NUM_ENVS)) % 7 == 6, 2, 1))


def read_after_each(adder, steps):
    for step in steps:
        yield step
        adder.flush_pending()


def items(signature=None, adder=adders.SequenceAdder, reads=False, **options):
    client = make_client(replay.Table.queue(TABLE, 1000, signature=signature))
    adder = adder(client, **options)
    feed(adder, read_after_each(adder, steps()) if reads else steps())
    adder.flush()
    return client.sample_batch(TABLE, client.server_info()[TABLE].current_size).data


@pytest.mark.parametrize("end", ["ZERO_PAD", "WRITE", "CONTINUE"])
@pytest.mark.parametrize("length, period", [(4, 3), (4, 4), (5, 1), (1, 1)])
@pytest.mark.parametrize("reads", [False, True], ids=["one block", "blocks of a step"])
def test_they_are_those_of_the_first_row(length, period, end, reads):
    options = {"sequence_length": length, "period": period, "end_of_episode_behavior": end, "reads": reads}
    every, first = items(**options), items(**options, extras_of_first_row=["state"])
    expected = tree.map_structure(lambda leaf: leaf[:, 0], every.extras["state"])
    tree.map_structure(np.testing.assert_array_equal, first.extras["state"], expected)
    assert first.extras["state"][0].shape == (len(first.mask), 2)
    rest = every._replace(extras={"log_prob": every.extras["log_prob"]})
    kept = first._replace(extras={"log_prob": first.extras["log_prob"]})
    tree.map_structure(np.testing.assert_array_equal, kept, rest)


def test_they_are_those_of_the_first_row_of_an_unroll():
    options = {"adder": adders.UnrollAdder, "unroll_length": 4, "priority_fns": {TABLE: None}}
    every, first = items(**options), items(**options, extras_of_first_row=["state"])
    expected = tree.map_structure(lambda leaf: leaf[:, 0], every.extras["state"])
    tree.map_structure(np.testing.assert_array_equal, first.extras["state"], expected)


def test_priority_functions_see_them_as_they_are_stored():
    seen = []

    def priority(step):
        seen.append(step.extras["state"][1]["age"])
        return step.mask.sum(-1)

    data = items(sequence_length=4, period=3, extras_of_first_row=["state"], priority_fns={TABLE: priority})
    np.testing.assert_array_equal(np.concatenate(seen), data.extras["state"][1]["age"])


def test_priority_functions_may_go_without_observations():
    seen = {}
    for sees in (True, False):
        steps = seen[sees] = []

        def priority(step, steps=steps):
            steps.append(step)
            return step.mask.sum(-1)

        options = {"extras_of_first_row": ["state"], "priority_fns": {TABLE: priority}}
        items(sequence_length=4, period=3, priorities_see_observations=sees, **options)
    assert {leaf is None for step in seen[False] for leaf in tree.flatten(step.observation)} == {True}
    for step, without in zip(seen[True], seen[False], strict=True):
        assert tree.flatten(step.observation)[0] is not None
        rest = [each._replace(observation=()) for each in (step, without)]
        tree.map_structure(np.testing.assert_array_equal, *rest)


def test_a_table_with_the_signature_takes_the_items():
    state = (dm_specs.Array((2,), np.float32), {"age": dm_specs.Array((), np.int64)})
    extras = {"log_prob": dm_specs.Array((), np.float32), "state": state}
    signature = adders.SequenceAdder.signature(make_spec(), extras, 4, ["state"])
    assert signature.extras["state"][0].shape == (2,) and signature.extras["log_prob"].shape == (4,)
    assert len(items(signature, sequence_length=4, period=3, extras_of_first_row=["state"]).mask)
    wrong = adders.SequenceAdder.signature(make_spec(), extras, 4)
    with pytest.raises(ValueError, match="state"):
        items(wrong, sequence_length=4, period=3, extras_of_first_row=["state"])


def test_a_name_that_no_extra_has_is_an_error():
    with pytest.raises(ValueError, match=r"got \['core'\] with extras \['log_prob', 'state'\]"):
        items(sequence_length=4, period=3, extras_of_first_row=["core"])


def test_the_rows_go_when_the_items_do():
    client = make_client()
    adder = adders.SequenceAdder(client, 4, 3, extras_of_first_row=["state"])
    feed(adder, steps())
    adder.close()
    count = client.server_info()[TABLE].current_size
    assert client.store.streams["first_rows"].num_rows == count
    client.sample_batch(TABLE, count)
    assert client.store.streams["first_rows"].num_rows == 0
