"""Returns before and after a step, against other formulations, env by env."""

from unittest import mock

import adder_steps
import dm_env
import numpy as np
import pytest
import torch

from agents.ppo import PPO, PPOConfig
from framework import adders, networks, replay
from framework.environments.testing import FakeEnvironment
from framework.networks import as_tensors
from framework.specs import make_environment_spec

FIRST, MID, LAST = 0, 1, 2
GAMMA, ENVS, STEPS = 0.9, 3, 400


@pytest.mark.parametrize("unroll, clip", [(2, None), (5, None), (50, None), (5, 3.0)])
def test_the_scale_is_that_of_whole_episodes_whatever_the_unroll(unroll, clip):
    """Unrolls may be cut anywhere and learned from in any order of the envs."""
    config = PPOConfig(unroll_length=unroll, normalize_rewards=True, discount=GAMMA, reward_clip=clip)
    agent = PPO(config).for_program(ENVS)
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
                reward = float(rewards[env])
                running[env] = GAMMA * running[env] + (reward if clip is None else min(reward, clip))
                expected.append(running[env])
        if t % unroll == 0:
            data = client.sample_batch("queue", ENVS, timeout=0).data
            order = rng.permutation(ENVS)
            mask, starts = (np.asarray(part, np.float32) for part in (data.mask, data.start_of_episode))
            starts[:, 0] = 0
            parts = (agent.rewards(as_tensors(data)).numpy(), starts, mask)
            scale.update(
                *(torch.as_tensor(part[order]) for part in parts),
                GAMMA,
                before=torch.as_tensor(data.extras["running_return"][order]),
            )
    assert scale.returns.count == len(expected)
    assert scale.returns.std().item() == pytest.approx(np.std(expected), rel=1e-4)


def whole_episodes(rng, count):
    """`(rewards, discounts, how it ends)` of episodes of 1 to 12 steps."""
    for number in range(count):
        length = int(rng.integers(1, 13))
        discounts = np.where(rng.random(length) < 0.2, 0.5, 1.0).astype(np.float32)
        ends = ("terminated", "truncated", "cut short")[number % 3]
        discounts[-1] *= ends != "terminated"
        yield rng.normal(-1, 1, length).astype(np.float32), discounts, ends


def returns_to_go(rewards, discounts, ends):
    """Of each step, one by one: the sum of what follows, and of 400 more steps with the mean reward."""
    more = 0 if ends == "terminated" else 400
    rewards = [*map(float, rewards), *[float(np.mean(rewards))] * more]
    discounts = [*map(float, discounts), *[1.0] * more]
    factors = lambda t: np.cumprod([1.0, *(GAMMA * d for d in discounts[t:-1])])  # noqa: E731
    return [float(np.dot(factors(t), rewards[t:])) for t in range(len(rewards) - more)]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("in_flight", [4, 512])
def test_items_have_the_return_from_their_first_step_on(n_step, in_flight):
    """Three envs play episodes of other lengths; an action names the episode and its step."""
    rng, make = np.random.default_rng(0), adders.NStepTransitionAdder
    queues = [list(whole_episodes(rng, 9)) for _ in range(ENVS)]
    clients = [adder_steps.make_client() for _ in range(2)]
    options = {"max_in_flight_items": in_flight, "max_delay": 1e9, "reward_clip": 1.5}
    adder = adders.ReturnToGoAdder(clients[0], n_step, GAMMA, **options)
    both = adders.ForkingAdder([adder, make(clients[1], n_step, GAMMA, **options)])
    zeros, at, time = np.zeros(ENVS, np.float32), [(0, 0)] * ENVS, 0
    both.add_first(dm_env.TimeStep(np.zeros(ENVS, int), zeros, zeros, zeros))
    while min(number for number, _ in at) < 9:
        action, kinds = np.zeros((ENVS, 2), int), np.zeros(ENVS, int)
        rewards, discounts = zeros.copy(), zeros + 1
        for env, (number, step) in enumerate(at):
            episode = queues[env][number % 9]  # An env that is through begins again.
            if step < len(episode[0]):
                action[env], rewards[env] = (100 * env + number, step), episode[0][step]
                kinds[env], discounts[env], at[env] = MID, episode[1][step], (number, step + 1)
                if step + 1 == len(episode[0]) and episode[2] != "cut short":
                    kinds[env] = LAST
            else:
                at[env] = number + 1, 0
        time += 1
        both.add(action, dm_env.TimeStep(kinds, rewards, discounts, zeros + time))
    both.flush()
    found, plain = ([item for item in adder_steps.read(each) if item.action[0] % 100 < 9] for each in clients)
    for item in found:
        env, number = divmod(int(item.action[0]), 100)
        rewards, *rest = queues[env][number]
        expected = returns_to_go(rewards.clip(-1.5, 1.5), *rest)[int(item.action[1])]
        assert item.extras["return_to_go"] == pytest.approx(expected, rel=1e-4)
    lines = [
        sorted(str([np.array(leaf).tolist() for leaf in each[:5]]) for each in part)
        for part in (found, plain)
    ]
    assert lines[0] == lines[1]


def test_a_return_needs_one_reward_and_survives_a_long_episode():
    client = adder_steps.make_client()
    adder = adders.ReturnToGoAdder(client, 1, GAMMA, max_steps=5, max_in_flight_items=3, max_delay=1e9)
    adder_steps.play(adder, 12)  # All rewards are 1.
    adder.flush()
    found = [item.extras["return_to_go"].item() for item in adder_steps.read(client)]
    rest = [10.0 * (1 - GAMMA**steps) for steps in range(6, 0, -1)]  # It terminates.
    assert found == pytest.approx([10.0] * 6 + rest)
    adder, zeros = adders.ReturnToGoAdder(client, 1, GAMMA), np.zeros(1, np.float32)
    adder.add_first(dm_env.TimeStep(np.zeros(1, int), None, None, zeros))
    with pytest.raises(ValueError, match="expected one number for each env to have returns"):
        adder.add(zeros, dm_env.TimeStep(np.ones(1, int), {"a": zeros, "b": zeros}, zeros, zeros))


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
