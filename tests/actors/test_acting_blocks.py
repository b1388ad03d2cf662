"""Several steps a call: the same episodes and limits as one by one, and faults that reach nothing."""

import functools

import numpy as np
import pytest
import torch
from faulty_environment import FaultyEnvironment

from agents.ppo import PPO, PPOConfig
from framework import adders, environments, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.environments import EnvironmentFault, EnvironmentWrapper, testing
from framework.networks import Actions
from framework.runs.services import Counter
from framework.torch_policy import TorchPolicy
from framework.workers.collector import Collector


def _make_policy(environment):
    spec = specs.make_environment_spec(environment)
    agent = PPO(PPOConfig(hidden_sizes=(4,)))
    torch.manual_seed(0)
    return agent.make_policy(agent.make_networks(spec))


def _make_client():
    return replay.EmbeddedClient([replay.Table.queue("queue", 100)], concurrent=False)


class Uneven(testing.EchoEnvironment):
    """Episodes of 2, 3, 4, 5, ... steps, by env."""

    made = 0

    def __init__(self):
        super().__init__(episode_length=2 + Uneven.made)
        Uneven.made += 1


def _play(block, budget, wrappers=()):
    """The budget in calls of so many steps: what the loop returns and counts."""
    Uneven.made = 0
    environment = environments.make(Uneven, num_envs=3, wrappers=wrappers)
    counter, client = Counter(), _make_client()
    adder = adders.UnrollAdder(client, 4)
    collector = Collector(environment, _make_policy(environment), adder, seed=1)
    collector.loop._counter = counter
    found, left, calls = [], budget, 0
    while left:
        steps = collector.collect(block, left)
        assert steps.made <= left and steps.calls <= block
        left, calls = left - steps.made, calls + steps.calls
        if steps.ended is not None:
            columns = [steps.ended[name].tolist() for name in ("env", "episode_length", "episode_return")]
            found += zip(*columns, strict=True)
        while not adder.ready():
            client.sample_batch("queue", 3, timeout=10)
    return found, collector.loop.num_steps, calls, counter.get_counts()


@pytest.mark.parametrize("budget", [50, 52, 60])
@pytest.mark.parametrize("block", [2, 3, 4])
def test_calls_of_many_steps_make_what_single_steps_make(block, budget):
    expected = _play(1, budget)
    assert expected[1] == budget == expected[3]["steps"] and expected[3]["episodes"] == len(expected[0])
    assert _play(block, budget) == expected


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_environment_writes_into_the_rows_of_the_adder(wrapped):
    """Behind a wrapper of another package it does not, and the adder stores the same."""
    foreign = type("Foreign", (EnvironmentWrapper,), {})
    environment = environments.make(
        testing.EchoEnvironment, num_envs=2, wrappers=[foreign] if wrapped else []
    )
    client = _make_client()
    adder = adders.UnrollAdder(client, 6)
    actor = PolicyActor(_make_policy(environment), adder, num_envs=2, seed=1)
    loop = EnvironmentLoop(environment, actor)
    loop.collect(2)
    loop.collect(3)
    held = adder._block.fields["observation"].arrays[0]
    assert np.shares_memory(loop.timestep.observation, held)
    loop.step()
    item = client.sample_batch("queue", 1, timeout=10).data
    np.testing.assert_array_equal(item.observation[0, :, 0], [0, 1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(item.mask[0], [1, 1, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(item.reward[0, :5], 100 * item.observation[0, :5, 0] + item.action[0, :5])
    adder.close()


@pytest.mark.parametrize("fault", ["nan_observation", "nan_reward"])
@pytest.mark.parametrize("stores", [True, False])
def test_a_fault_is_named_at_the_end_of_its_block_and_reaches_nothing(fault, stores):
    make = functools.partial(FaultyEnvironment, fault, at=8, episode_length=4)
    environment = environments.make(make, num_envs=2)
    client = _make_client()
    adder = adders.UnrollAdder(client, 6) if stores else None
    actor = PolicyActor(_make_policy(environment), adder, num_envs=2, seed=1)
    loop = EnvironmentLoop(environment, actor)
    loop.collect(3)
    with pytest.raises(EnvironmentFault, match=f"env 0: {fault[4:]} holds NaN"):
        loop.collect(3 * 6)
    ended = loop.collect(7)  # From a reset: episodes of 4 steps.
    assert ended["episode_length"].tolist() == [4, 4] and np.isfinite(ended["episode_return"]).all()
    assert loop.num_steps < 2 * 17
    if adder is not None:
        loop.collect(5)
        adder.flush(0)
        items = client.server_info()["queue"].current_size
        assert items
        data = client.sample_batch("queue", items, timeout=10).data
        assert np.isfinite(data.observation).all() and np.isfinite(data.reward).all()
        adder.close()


def test_a_fault_that_only_the_loop_finds_is_not_written_when_the_adder_closes():
    make = functools.partial(FaultyEnvironment, "nan_reward", at=5, episode_length=9)
    environment = environments.make(make, num_envs=2)
    client = replay.EmbeddedClient([replay.Table.queue("replay", 100)], concurrent=True)
    adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=60.0)
    actor = PolicyActor(_make_policy(environment), adder, num_envs=2, seed=1)
    loop = EnvironmentLoop(environment, actor)
    loop.collect(1)
    with pytest.raises(EnvironmentFault, match="env 0: reward holds NaN"):
        loop.collect(7)
    assert adder.close(1.0) == 0
    assert loop.num_steps == 2 and client.server_info()["replay"].current_size == 0


class Follows(TorchPolicy):
    """Its action is what it observes."""

    def act(self, observation, state):
        return observation, (), state


def test_an_action_that_follows_from_a_fault_does_not_hide_it():
    spec = testing.make_spec(specs.Array((1,), np.float32), specs.BoundedArray((1,), np.float32, -1, 1))

    class Breaks(testing.FakeEnvironment):
        def __init__(self):
            super().__init__(spec, seed=0)
            self.left = 5

        def step(self, action):
            self.left -= 1
            number = 0.0 if self.left else np.nan
            return super().step(action)._replace(observation=np.full(1, number, np.float32))

    environment = environments.make(Breaks)
    policy = Follows(torch.nn.Linear(1, 1), Actions(spec.actions))
    # Only parts of this package share arrays with the environment.
    Follows.__module__ = "framework.follows"
    loop = EnvironmentLoop(environment, PolicyActor(policy))
    loop.collect(2)
    with pytest.raises(EnvironmentFault, match="env 0: observation holds NaN"):
        loop.collect(20)


@pytest.mark.parametrize("limits", [{"num_steps": 6}, {"num_episodes": 2}])
def test_after_a_run_the_environment_is_the_callers(limits):
    environment = environments.make(testing.EchoEnvironment, num_envs=2)
    client = _make_client()
    adder = adders.UnrollAdder(client, 6)
    loop = EnvironmentLoop(environment, PolicyActor(_make_policy(environment), adder, num_envs=2, seed=1))
    loop.run(**limits)
    action = np.zeros(2, np.int64)
    one, other = environment.step(action), environment.step(action)
    held = adder._block.fields["observation"].arrays[0]
    assert not np.shares_memory(one.observation, held)
    assert not np.shares_memory(one.observation, other.observation)
    assert np.abs(one.observation - other.observation).max() > 0
    adder.close()
