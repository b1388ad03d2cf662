"""Running returns across unrolls, against those of baselines' `VecNormalize`, env by env."""

from unittest import mock

import dm_env
import numpy as np
import pytest
import torch

from agents.ppo import PPO, PPOConfig
from framework import adders, networks, replay
from framework.environments.testing import FakeEnvironment
from framework.specs import make_environment_spec

FIRST, MID, LAST = 0, 1, 2
GAMMA, ENVS, STEPS = 0.9, 3, 400


@pytest.mark.parametrize("unroll", [2, 5, 50])
def test_the_scale_is_that_of_whole_episodes_whatever_the_unroll(unroll):
    """Unrolls may be cut anywhere and learned from in any order of the envs."""
    agent = PPO(PPOConfig(unroll_length=unroll, normalize_rewards=True, discount=GAMMA)).for_program(ENVS)
    tables, spec = agent.make_tables(None), make_environment_spec(FakeEnvironment())
    client = replay.EmbeddedClient(tables, concurrent=False)
    adder, rng, scale = agent.make_adder(client, spec), np.random.default_rng(0), networks.RewardScale()
    running, expected = [0.0] * ENVS, []
    zeros, kinds = np.zeros(ENVS, np.float32), np.full(ENVS, FIRST)
    adder.add_first(dm_env.TimeStep(kinds, zeros, zeros, zeros))
    for t in range(1, STEPS // unroll * unroll + 1):
        kinds = np.array([FIRST if k == LAST else MID + (rng.random() < 0.1) for k in kinds])
        rewards = rng.normal(3, 1, ENVS).astype(np.float32) * (kinds != FIRST)
        adder.add(zeros, dm_env.TimeStep(kinds, rewards, zeros, zeros), {"version": zeros})
        for env in range(ENVS):
            if kinds[env] == FIRST:
                running[env] = 0.0
            else:
                running[env] = GAMMA * running[env] + float(rewards[env])
                expected.append(running[env])
        if t % unroll == 0:
            data = client.sample_batch("queue", ENVS, timeout=0).data
            order = rng.permutation(ENVS)
            mask, starts = (np.asarray(part, np.float32) for part in (data.mask, data.start_of_episode))
            starts[:, 0] = 0
            parts = (data.reward, starts, mask)
            scale.update(
                *(torch.as_tensor(part[order]) for part in parts),
                GAMMA,
                before=torch.as_tensor(data.extras["running_return"][order]),
            )
    assert scale.returns.count == len(expected)
    assert scale.returns.std().item() == pytest.approx(np.std(expected), rel=1e-4)


def test_several_rewards_have_a_running_return_each():
    seen = []

    class Kept(adders.ForkingAdder):
        def add(self, action, next_timestep, extras=()):
            seen.append(extras["running_return"])

    adder, one = adders.RunningReturnAdder(Kept([mock.Mock()]), 0.5, {"a": 0, "b": 0}), np.ones(2, np.float32)
    adder.add_first(dm_env.TimeStep(np.array([FIRST, FIRST]), None, None, one))
    for kinds in ([MID, LAST], [MID, FIRST], [MID, MID]):
        adder.add(one, dm_env.TimeStep(np.array(kinds), {"a": one, "b": 3 * one}, one, one), {})
    assert [each["a"].tolist() for each in seen] == [[0, 0], [1, 1], [1.5, 0]]
    assert [each["b"].tolist() for each in seen] == [[0, 0], [3, 3], [4.5, 0]]
