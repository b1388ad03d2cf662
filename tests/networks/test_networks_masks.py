"""Action masks: illegal actions are neither drawn nor bootstrapped from, and nothing becomes NaN."""

import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs

from framework import networks, specs
from framework.environments.testing import make_spec

MASK = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]])
SEEN = {"observation": {"board": torch.zeros(3, 2), "action_mask": MASK}, "reward": torch.zeros(3)}
VALUES = torch.tensor([[1.0, 9.0, 2.0], [3.0, -4.0, 5.0], [7.0, 8.0, 6.0]])


def test_values_of_illegal_actions_are_no_maximum():
    values = networks.mask_values(VALUES, SEEN)
    # A row that allows nothing is not masked.
    assert values.argmax(-1).tolist() == [2, 1, 1] and values.isfinite().all()
    assert values.amax(-1).tolist() == [2.0, -4.0, 8.0]
    assert networks.mask_values(VALUES, SEEN["observation"]["board"]) is VALUES
    bool_mask = {"action_mask": MASK.bool()}
    assert torch.equal(networks.mask_values(VALUES, bool_mask), values)


@pytest.mark.parametrize("epsilon", [0.5, 1.0])
def test_exploration_is_uniform_over_legal_actions(epsilon):
    count, generator = 3_000, torch.Generator().manual_seed(0)
    seen = {"action_mask": MASK[:2].repeat(count, 1)}
    values = VALUES[:2].repeat(count, 1)
    first, second = networks.epsilon_greedy(values, seen, epsilon, generator).view(count, 2).unbind(1)
    assert (second == 1).all() and not (first == 1).any()
    assert (first == 0).float().mean().item() == pytest.approx(0.5 * epsilon, abs=0.05)


def test_the_mask_is_no_input_of_the_encoder_and_the_normalizer():
    spec = {
        "board": dm_specs.Array((2,), np.float32),
        "action_mask": dm_specs.BoundedArray((3,), np.float32, 0, 1),
    }
    encoder = networks.ObservationEncoder(spec)
    observation = {"board": torch.tensor([[0.5, 2.0]]), "action_mask": torch.tensor([[1.0, 0.0, 1.0]])}
    assert encoder.output_size == 2 and torch.equal(encoder(observation), observation["board"])
    normalizer = networks.ObservationNormalizer(spec, True)
    rows = {name: leaf.repeat(4, 1, 1) for name, leaf in observation.items()}
    normalizer.update(rows, torch.ones(4, 1) > 0)
    scaled = normalizer(observation)
    assert torch.equal(scaled["action_mask"], observation["action_mask"])
    assert not torch.equal(scaled["board"], observation["board"])


CHOICES = {
    "pick": dm_specs.DiscreteArray(2),
    "push": dm_specs.BoundedArray((1,), np.float32, -1, 1),
    "set": dm_specs.BoundedArray((2,), np.int64, [1, 0], [2, 2]),
}
NESTED = {"pick": torch.tensor([[0, 1]]), "set": (torch.tensor([[1, 0]]), torch.tensor([[0, 1, 1]]))}
FLAT = torch.tensor([[0, 1, 1, 0, 0, 1, 1]])


@pytest.mark.parametrize("mask", [NESTED, FLAT], ids=["nest", "vector"])
def test_masks_of_several_choices_stand_side_by_side(mask):
    torch.manual_seed(0)
    head = networks.make_actions(CHOICES).make_head(4)
    features = torch.randn(1, 4, requires_grad=True)
    policy = networks.masked_policy(head, features.expand(200, 4), {"action_mask": _repeat(mask, 200)})
    drawn = policy.sample(torch.Generator().manual_seed(0))
    pick, _, first, second = drawn.unbind(-1)
    assert (pick == 1).all() and (first == 0).all()
    assert set(second.tolist()) == {1.0, 2.0}
    for value in (policy.log_prob(drawn), policy.entropy(), policy.kl(policy)):
        assert value.isfinite().all()
    (gradient,) = torch.autograd.grad(policy.entropy().sum() + policy.log_prob(drawn).sum(), features)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0


def _repeat(mask, count):
    if isinstance(mask, dict):
        return {name: _repeat(leaf, count) for name, leaf in mask.items()}
    if isinstance(mask, tuple):
        return tuple(_repeat(leaf, count) for leaf in mask)
    return mask.expand(count, -1)


def test_a_mask_that_allows_nothing_is_none():
    features = torch.randn(1, 2)
    head = networks.make_actions(dm_specs.DiscreteArray(3)).make_head(2)
    logits = [
        networks.masked_policy(head, features, {"action_mask": mask}).logits
        for mask in (torch.zeros(1, 3), torch.ones(1, 3))
    ]
    torch.testing.assert_close(*logits)


def test_exploration_is_uniform_where_a_mask_allows_nothing():
    values, seen = torch.zeros(3_000, 3), {"action_mask": torch.zeros(3_000, 3)}
    drawn = networks.epsilon_greedy(values, seen, 1.0, torch.Generator().manual_seed(0))
    assert (drawn.bincount(minlength=3) / 3_000).tolist() == pytest.approx([1 / 3] * 3, abs=0.05)


def test_a_policy_that_may_do_nothing_is_uniform_and_has_no_gradient():
    logits = torch.tensor([[3.0, 1.0, 2.0]], requires_grad=True)
    policy = networks.Categorical(logits, torch.zeros(1, 3))
    for value, expected in ((policy.entropy(), np.log(3)), (policy.log_prob(torch.tensor([1])), -np.log(3))):
        assert value.item() == pytest.approx(expected, abs=1e-5)
        (gradient,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
        assert (gradient == 0).all()


def _spec(mask, actions=None):
    board = dm_specs.Array((2,), np.float32)
    return make_spec({"board": board, "action_mask": mask}, actions)


@pytest.mark.parametrize(
    ("mask", "actions", "takes", "message"),
    [
        ((3,), None, True, r"action_mask: got shapes \[\(3,\)\] in the observation, expected 2 entries"),
        ((1, 2), None, True, r"action_mask: got shapes \[\(1, 2\)\] in the observation, expected 2 entries"),
        ((2,), CHOICES["push"], True, r"expected 0 entries along one axis in one mask, one for each value"),
        ((4,), CHOICES["set"], True, r"expected 5 entries along one axis"),
        ((2,), None, False, r"in the observation, expected none: MAML takes no masks\."),
    ],
)
def test_a_mask_that_does_not_fit_is_named(mask, actions, takes, message):
    with pytest.raises(ValueError, match=message):
        networks.check_action_mask(_spec(dm_specs.Array(mask, bool), actions), "MAML", takes)


@pytest.mark.parametrize(
    "masks",
    [
        {"action_mask": {"x": dm_specs.Array((3,), bool), "y": dm_specs.Array((2,), bool)}},
        {"p": {"action_mask": dm_specs.Array((2,), bool)}, "q": {"action_mask": dm_specs.Array((3,), bool)}},
    ],
    ids=["order", "two masks"],
)
def test_parts_of_a_mask_that_are_not_those_of_the_actions(masks):
    actions = {"a": dm_specs.DiscreteArray(2), "b": dm_specs.DiscreteArray(3)}
    spec = make_spec()._replace(observations=masks, actions=actions)
    with pytest.raises(ValueError, match="expected 5 entries along one axis in one mask"):
        networks.check_action_mask(spec, "PPO", True)
    nest = {"a": dm_specs.Array((2,), bool), "b": dm_specs.Array((3,), bool)}
    networks.check_action_mask(spec._replace(observations={"action_mask": nest}), "PPO", True)


def test_a_mask_that_fits():
    networks.check_action_mask(_spec(dm_specs.Array((5,), bool), CHOICES["set"]), "PPO", True)
    networks.check_action_mask(make_spec(), "MAML", False)
    nested = {name: leaf for name, leaf in CHOICES.items() if name != "push"}
    networks.check_action_mask(_spec(dm_specs.Array((7,), bool), nested), "PPO", True)
    assert specs.action_mask(((), {"a": 1})) is None and specs.action_mask((1, {"action_mask": 2})) == 2
