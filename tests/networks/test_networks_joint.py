"""Nested actions: distributions against torch's, conversions there and back, two agents that learn."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
import tree
from dm_env import specs as dm_specs
from torch import distributions as reference

from framework.networks import Actions, JointActions, make_actions
from framework.types import Step

SPEC = {
    "pick": dm_specs.DiscreteArray(3),
    "push": dm_specs.BoundedArray((2,), np.float32, [-1.0, 0.0], [1.0, 4.0]),
    "set": (dm_specs.BoundedArray((2,), np.int64, [1, 0], [2, 2]),),
}


def _made(spec=SPEC):
    torch.manual_seed(0)
    actions = make_actions(spec)
    return actions, actions.make_head(6)(torch.randn(5, 6) * 20.0)


def test_a_joint_distribution_is_the_product_of_its_parts():
    actions, joint = _made()
    _, other = _made()
    other.parts[0].logits = other.parts[0].logits + torch.arange(3.0)
    drawn = joint.sample(torch.Generator().manual_seed(1))
    assert drawn.shape == (5, 5)

    def of_torch(joint):
        pick, push, choices = joint.parts
        return [
            reference.Categorical(logits=pick.logits),
            reference.Independent(reference.Normal(push.mean, push.log_std.exp()), 1),
            *[reference.Categorical(logits=part.logits) for part in choices.parts],
        ]

    values = [drawn[:, 0], drawn[:, 1:3], drawn[:, 3], drawn[:, 4]]
    expected = sum(part.log_prob(value) for part, value in zip(of_torch(joint), values, strict=True))
    torch.testing.assert_close(joint.log_prob(drawn), expected)
    torch.testing.assert_close(joint.entropy(), sum(part.entropy() for part in of_torch(joint)))
    pairs = zip(of_torch(joint), of_torch(other), strict=True)
    torch.testing.assert_close(joint.kl(other), sum(reference.kl_divergence(p, q) for p, q in pairs))
    again = actions.distribution(actions.parameters(joint))
    torch.testing.assert_close(again.log_prob(drawn), expected)
    assert torch.equal(again.mode()[:, 0], joint.parts[0].logits.argmax(-1).float())


def test_the_environment_gets_a_nest_within_its_bounds():
    actions, joint = _made()
    drawn = joint.sample(torch.Generator().manual_seed(1)) * torch.tensor([1.0, 9.0, 9.0, 1.0, 1.0])
    given = actions.to_environment(drawn.numpy())
    tree.map_structure(np.testing.assert_array_equal, actions.to_environment(drawn), given)
    for spec, values in zip(tree.flatten(SPEC), tree.flatten(given), strict=True):
        for value in values:
            spec.validate(value)
    np.testing.assert_array_equal(given["pick"], drawn[:, 0])
    np.testing.assert_array_equal(given["set"][0], drawn[:, 3:].numpy() + [1, 0])


def test_the_learner_gets_joint_actions_as_sampled():
    actions, joint = _made()
    assert isinstance(actions, JointActions) and actions.continuous
    drawn = joint.sample(torch.Generator().manual_seed(1))
    data = Step((), actions.to_environment(drawn.numpy()), (), (), (), {"action": drawn})
    assert actions.drawn(data) is drawn
    discrete, joint = _made({"pick": SPEC["pick"], "set": SPEC["set"]})
    drawn = joint.sample(torch.Generator().manual_seed(1))
    taken = tree.map_structure(torch.as_tensor, discrete.to_environment(drawn.numpy()))
    assert not discrete.continuous
    assert torch.equal(discrete.drawn(Step((), taken, (), (), ())), drawn)
    assert isinstance(make_actions(SPEC["pick"]), Actions)


@pytest.mark.parametrize(
    ("spec", "squash"),
    [
        (dm_specs.DiscreteArray(3, np.int32), False),
        (dm_specs.BoundedArray((2, 2), np.int64, 1, 4), False),
        (dm_specs.BoundedArray((4,), np.float64, [-1, 0, 2, -9], [1, 0, 3, 1]), True),
        (dm_specs.BoundedArray((4,), np.float32, [-1, 0, 2, -np.inf], [1, 0, 3, 1]), False),
    ],
)
def test_tensors_become_the_same_actions_as_arrays(spec, squash):
    actions = Actions(spec, squash)
    head = actions.make_head(5)
    drawn = head(torch.randn(7, 5, generator=torch.Generator().manual_seed(0))).sample(None)
    found, expected = actions.to_environment(drawn), actions.to_environment(drawn.detach().numpy())
    assert found.numpy().dtype == expected.dtype == spec.dtype
    np.testing.assert_array_equal(found, expected)


def test_the_largest_numbers_are_no_bounds():
    most = np.finfo(np.float32).max
    spec = dm_specs.BoundedArray((2,), np.float32, -most, most)
    drawn = np.array([[0.1, 0.0]], np.float32)
    np.testing.assert_array_equal(Actions(spec).to_environment(drawn), drawn)
    with pytest.raises(ValueError, match="expected finite bounds"):
        Actions(spec, squash=True)


def test_a_closing_row_has_the_first_action_of_a_range_that_does_not_begin_at_zero():
    data = types.SimpleNamespace(action=torch.tensor([[[0, 0], [2, 3], [4, 9]]]))
    drawn = Actions(dm_specs.BoundedArray((2,), np.int64, 2, [4, 5])).drawn(data)
    assert drawn.tolist() == [[[0, 0], [0, 1], [2, 3]]]
