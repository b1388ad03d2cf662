"""Nested actions: distributions against torch's, conversions there and back, two agents that learn."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
import tree
from dm_env import specs as dm_specs
from gymnasium import spaces
from torch import distributions as reference

import launch
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from framework.networks import Actions, JointActions, make_actions
from framework.programs import RunConfig, make_program
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
    tree.assert_same_structure(given, SPEC)
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


class Mixed(gymnasium.Env):
    """Rewards the sign of one number as a choice, and another number as a push: at most 20 in ten steps."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Dict({"pick": spaces.Discrete(2), "push": spaces.Box(-1, 1, (1,), np.float32)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def _observe(self):
        self.shown = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.shown

    def step(self, action):
        assert self.action_space.contains(action)
        picked = float((self.shown[0] > 0) == action["pick"])
        reward = picked + 1.0 - abs(float(self.shown[1] - action["push"][0]))
        self.time += 1
        return self._observe(), reward, False, self.time == 10, {}


AGENTS = {
    "ppo": PPO(PPOConfig(unroll_length=32, epochs=6, minibatch_size=128, learning_rate=2e-3, discount=0.0)),
    "impala": IMPALA(
        IMPALAConfig(unroll_length=10, batch_size=16, optimizer="adam", learning_rate=3e-3, discount=0.0)
    ),
}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_learns_nested_actions(name):
    """Random actions have a mean of 8.3."""
    config = RunConfig(envs_per_actor=16, max_env_steps=12_000, evaluate_period=12_000, seed=1)
    result = launch.launch(make_program(AGENTS[name], Mixed, config), engine="serial")
    assert result["episode_return"] > 14.0


def test_the_largest_numbers_are_no_bounds():
    most = np.finfo(np.float32).max
    spec = dm_specs.BoundedArray((2,), np.float32, -most, most)
    drawn = np.array([[0.1, 0.0]], np.float32)
    np.testing.assert_array_equal(Actions(spec).to_environment(drawn), drawn)
    with pytest.raises(ValueError, match="expected finite bounds"):
        Actions(spec, squash=True)
