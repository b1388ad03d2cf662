"""Random actions fit any spec of bounded arrays and repeat from their seed."""

import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs

from agents.random_actions import RandomActions, RandomPolicy
from framework.environments.testing import make_spec

SPECS = {
    "discrete": dm_specs.DiscreteArray(5),
    "multi-discrete": dm_specs.BoundedArray((2,), np.int32, [0, 2], [3, 9]),
    "bounded": dm_specs.BoundedArray((3,), np.float32, [-1, 0, 5], [1, 10, 6]),
    "half bounded": dm_specs.BoundedArray((1,), np.float32, 0, np.inf),
    "half precision": dm_specs.BoundedArray((1,), np.float16, 0, np.inf),
    "unbounded": dm_specs.Array((2,), np.float64),
    "all integers": dm_specs.BoundedArray((1,), np.int64, *(np.iinfo(np.int64).min, np.iinfo(np.int64).max)),
    "boolean": dm_specs.BoundedArray((2,), bool, False, True),
    "nested": {"a": dm_specs.DiscreteArray(2), "b": (dm_specs.BoundedArray((1,), np.float32, -2, 2),)},
}


@pytest.mark.parametrize("name", SPECS)
def test_actions_fit_the_spec_and_use_all_of_it(name):
    spec, policy = SPECS[name], RandomPolicy(SPECS[name])
    with np.errstate(all="raise"):
        actions, _, _ = policy.step(np.zeros((200, 4), np.float32), policy.initial_state(200))
    for leaf, leaf_spec in zip(tree.flatten(actions), tree.flatten(spec), strict=True):
        assert leaf.shape == (200, *leaf_spec.shape)
        for row in leaf:
            leaf_spec.validate(row)
        assert len(np.unique(leaf)) > 1


@pytest.mark.parametrize(
    ("low", "high", "range_"),
    [
        (0, np.inf, (0, 1)),
        (5, np.inf, (5, 6)),
        (-np.inf, 3, (-1, 3)),
        (-np.inf, -5, (-6, -5)),
        (-np.inf, np.inf, (-1, 1)),
        (np.finfo(np.float32).min, np.finfo(np.float32).max, (-1, 1)),
    ],
)
def test_floats_without_a_bound_are_small(low, high, range_):
    policy = RandomPolicy(dm_specs.BoundedArray((), np.float32, low, high))
    actions, _, _ = policy.step(np.zeros((200, 4), np.float32), ())
    assert [actions.min(), actions.max()] == pytest.approx(range_, abs=0.1)


def test_seed_and_saved_state_repeat_the_actions():
    def act(policy):
        return policy.step(np.zeros((50, 4), np.float32), ())[0].tolist()

    first, second = RandomPolicy(SPECS["discrete"]), RandomPolicy(SPECS["discrete"])
    first.seed(1)
    second.seed(1)
    assert act(first) == act(second)
    second.restore(first.save())
    assert act(first) == act(second)


def test_the_learner_counts_and_has_no_variables():
    agent = RandomActions()
    learner = agent.make_learner(agent.make_networks(make_spec(actions=SPECS["discrete"])), None)

    class Batch:
        class data:
            reward = np.array([1.0, 3.0])

    assert learner.step(Batch).metrics == {"reward": 2.0}
    assert learner.parameters() == {}
    other = agent.make_learner(None, None)
    other.restore(learner.save())
    assert other.steps == 1


def test_action_masks_are_refused():
    spec = make_spec({"action_mask": dm_specs.Array((2,), bool)})
    with pytest.raises(ValueError, match="RandomActions takes no masks"):
        RandomActions().make_networks(spec)
