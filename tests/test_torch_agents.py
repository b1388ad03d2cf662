"""Base classes of agents: what policies keep, and what the smallest agent is."""

from __future__ import annotations

import callers
import numpy as np
import pytest
import torch
from agent_batches import DISCRETE, batch_of, flat, make_learner, make_policy
from agent_cases import SMALL, spec_of
from torch import nn

from framework.networks import Actions, as_tensors
from framework.torch_agents import TorchPolicy


class Dropped(TorchPolicy):
    def act(self, observation, state):
        drawn = torch.rand(len(observation), generator=self.random, device=self.device)
        return (self.networks(observation).sum(-1) + drawn > 0.5).long(), {"drawn": drawn}, state


def test_a_policy_is_in_evaluation_mode_and_without_gradients():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    policy = Dropped(module, Actions(DISCRETE.actions))
    assert not module.training
    observation = np.ones((6, 4), np.float32)
    first, again = (policy.networks(torch.as_tensor(observation)) for _ in range(2))
    assert torch.equal(first, again)
    action, extras, state = policy.step(observation, ())
    assert action.dtype == DISCRETE.actions.dtype and action.shape == (6,) and state == ()
    assert isinstance(extras["drawn"], np.ndarray)


@pytest.mark.parametrize("envs", [1, 6])
def test_extras_may_be_one_tensor(envs):
    class OneTensor(Dropped):
        def act(self, observation, state):
            drawn, _, state = super().act(observation, state)
            return drawn, torch.zeros(envs), state

    policy = OneTensor(nn.Linear(4, 4), Actions(DISCRETE.actions))
    _, extras, _ = policy.step(np.ones((envs, 4), np.float32), ())
    np.testing.assert_array_equal(extras, np.zeros(envs))


@pytest.mark.parametrize("name", ["dqn", "impala", "td3"])
def test_parts_that_are_called_by_hand_compute_the_same_whatever_is_set(name):
    agent, spec = SMALL[name], spec_of(name)
    batch = batch_of(agent, spec, 0)
    batch = batch._replace(data=as_tensors(batch.data))
    observation = np.ones((2, *spec.observations.shape), np.float32)

    def compute():
        learner, policy = make_learner(agent, spec), make_policy(agent, spec)
        learner.step(batch)
        learner.apply(learner.gradients(batch))
        return flat(learner.networks).tolist(), policy.step(observation, ())[0].tolist()

    expected = compute()
    with callers.unusual_settings():
        before = callers.settings()
        assert compute() == expected
        assert callers.settings() == before
