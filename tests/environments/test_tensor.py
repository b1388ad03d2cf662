"""Environments of tensors: gymnasium's dynamics, ends of episodes, the border, and PPO on them."""

import dataclasses
import functools

import dm_env
import gymnasium
import numpy as np
import pytest
import torch

import launch
from agents.ppo import PPO, PPOConfig, PPOPolicy
from framework import environments, specs
from framework.actors import EnvironmentLoop, EnvironmentLoopObserver, PolicyActor
from framework.environments import FIRST, LAST, MID, TensorEnvironment, tensor
from framework.environments.tensor_dynamics import CartPole, Pendulum, TensorDynamics
from framework.programs import RunConfig, make_program


def actions(environment, rng):
    spec = environment.action_spec()
    if isinstance(spec, specs.DiscreteArray):
        return torch.from_numpy(rng.integers(0, spec.num_values, environment.num_envs))
    return torch.from_numpy(rng.uniform(-3, 3, (environment.num_envs, 1)).astype(np.float32))


@pytest.mark.parametrize(("kind", "spread"), [(CartPole, [2.6, 3, 0.25, 3]), (Pendulum, [9, 8])])
def test_each_step_is_gymnasiums(kind, spread):
    environment, rng = kind(num_envs=300), np.random.default_rng(0)
    name = kind.name.removeprefix("tensor:")
    assert environment.spec == environments.make(f"gymnasium:{name}").spec
    environment.reset()
    states, chosen = rng.uniform(-1, 1, (300, len(spread))) * spread, actions(environment, rng)
    environment.state = torch.from_numpy(states.T.copy())
    timestep, peer = environment.step(chosen), gymnasium.make(name).unwrapped
    rewards = (environment.exact_rewards or [timestep.reward.numpy()])[0]
    peer.reset()
    for env in range(300):
        peer.state, peer.steps_beyond_terminated = states[env], None
        observation, reward, terminated, *_ = peer.step(chosen[env].numpy())
        np.testing.assert_allclose(environment.state[:, env], peer.state, rtol=0, atol=1e-9)
        np.testing.assert_allclose(timestep.observation[env], observation, rtol=1e-6, atol=1e-9)
        assert abs(rewards[env] - reward) < 1e-9
        assert (timestep.step_type[env], timestep.discount[env]) == ((LAST, 0) if terminated else (MID, 1))
    assert timestep.observation.is_contiguous() and timestep.observation.dtype == torch.float32


def test_episodes_end_and_begin_at_the_next_step():
    environment = environments.make(
        "tensor:CartPole-v1", num_envs=2, seed=1, options={"max_episode_steps": 3}
    )
    assert isinstance(environment, TensorEnvironment) and environment.device == torch.device("cpu")
    push = torch.ones(2, dtype=torch.int64)
    kept = [environment.step(push)]  # A reset, as every step before one.
    environment.state[2, 0] = 1.0  # Radians.
    kept += [environment.step(push) for _ in range(5)]
    environment.end_episodes(np.array([False, True]))
    kept.append(environment.step(push))
    table = [[getattr(each, name).tolist() for name in ("step_type", "reward", "discount")] for each in kept]
    assert table == [
        [[FIRST, FIRST], [0, 0], [1, 1]],
        [[LAST, MID], [1, 1], [0, 1]],  # A fall.
        [[FIRST, MID], [0, 1], [1, 1]],
        [[MID, LAST], [1, 1], [1, 1]],  # The limit.
        [[MID, FIRST], [1, 0], [1, 1]],
        [[LAST, MID], [1, 1], [1, 1]],
        [[FIRST, FIRST], [0, 0], [1, 1]],
    ]
    assert abs(kept[2].observation[0]).max() < 0.05
    assert len({leaf.data_ptr() for each in kept for leaf in each}) == 4 * len(kept)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.tensor([0, 2]), r"action of env 1 is .*2.*, outside 0 \.\.\. 1"),
        (torch.tensor([0, 1, 1]), r"action has shape \(3,\), expected \(2,\)"),
        (torch.tensor([0.5, 1.0]), "action has dtype float32, expected int64"),
    ],
)
def test_an_action_that_does_not_fit_is_told_as_of_arrays(action, message):
    environment = CartPole(num_envs=2)
    with pytest.raises(environments.EnvironmentFault, match=message):
        environment.step(action)
    assert environment.step(np.array([0, 1], np.int32)).reward.tolist() == [0, 0]


OTHERS = {"flags": torch.ones(2, 2).bool(), "none": torch.zeros(2, 0)}


class InPlace(TensorEnvironment):
    """A user's: scales its argument, observes in one buffer. `changes` are the fields of its steps."""

    def __init__(self, num_envs, changes=()):
        self.num_envs, self.device, self.changes = num_envs, torch.device("cpu"), dict(changes)
        numbers, flags = specs.Array((1,), np.float32, "x"), specs.Array((2,), np.bool_, "flags")
        seen = {"x": numbers, "flags": flags, "none": specs.Array((0,), np.float32, "none")}
        self.spec = CartPole().spec._replace(observations=seen, actions=numbers)

    def reset(self):
        self.buffer = torch.zeros(self.num_envs, 1)
        return self.observed(FIRST)

    def step(self, action):
        assert action.mul_(100.0).tolist() == [[50.0]] * self.num_envs
        self.buffer += 1
        return self.observed(MID)._replace(**self.changes)

    def observed(self, kind):
        rewards = torch.full((self.num_envs,), float(kind))
        kinds = torch.full_like(rewards, kind).long()
        return dm_env.TimeStep(kinds, rewards, rewards**0, {**OTHERS, "x": self.buffer})


def test_a_users_environment_gets_and_gives_copies():
    with environments.make(InPlace, num_envs=2) as environment:
        action, first = torch.full((2, 1), 0.5), environment.reset()
        kept = [first, *(environment.step(action) for _ in range(3))]
    assert [each.observation["x"][0, 0].item() for each in kept] == [0, 1, 2, 3]
    assert environment.device == torch.device("cpu") and action[0, 0] == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": torch.tensor([1.0, torch.nan])}, "env 1: reward holds NaN"),
        ({"discount": torch.tensor([1.0, 1.5])}, r"env 1: discount is .*1\.5.*outside 0"),
        ({"observation": {**OTHERS, "x": torch.zeros(2, 3)}}, r"observation/x has shape \(2, 3\)"),
        ({"observation": OTHERS}, "observation/x is missing"),
        ({"step_type": torch.tensor([1, 3])}, r"env 1: step_type is .*3.*outside 0 \.\.\. 2"),
    ],
)
def test_a_users_fault_is_named(changes, message):
    environment = environments.make(InPlace, num_envs=2, options={"changes": changes})
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=message):
        environment.step(torch.full((2, 1), 0.5))


def test_rewards_of_another_dtype_are_converted_and_returns_are_exact():
    environment = environments.make(
        InPlace, num_envs=2, options={"changes": {"reward": torch.tensor([0.1, 0.2], dtype=torch.float64)}}
    )
    environment.reset()
    assert environment.step(torch.full((2, 1), 0.5)).reward.dtype == torch.float32
    assert environment.exact_rewards[0].tolist() == [0.1, 0.2]


class Seen(EnvironmentLoopObserver):
    """Observers get arrays."""

    def observe_first(self, environment, timestep):
        assert isinstance(timestep.observation, np.ndarray)

    def observe(self, environment, timestep, action):
        assert {type(each) for each in (*timestep, action)} == {np.ndarray}

    def get_metrics(self, envs):
        return {}


@pytest.mark.parametrize(("kind", "recurrent"), [(CartPole, None), (Pendulum, "lstm")])
def test_the_actor_acts_on_tensors_as_on_arrays(kind, recurrent, monkeypatch):
    agent = PPO(PPOConfig(hidden_sizes=(8,), recurrent=recurrent))
    loops, seen = [], []
    for gives in (lambda each: each, tensor.as_arrays):
        environment = gives(kind(num_envs=3, seed=1, max_episode_steps=11))
        torch.manual_seed(0)
        policy = agent.make_policy(agent.make_networks(environment.spec))
        monkeypatch.setattr(
            policy, "act", lambda *each, act=policy.act: (seen.append(each[0]), act(*each))[1]
        )
        actor = PolicyActor(policy, num_envs=3, seed=1)
        loops.append(EnvironmentLoop(environment, actor, observers=[Seen()]))
    first, second = (loop.run_episodes(7) for loop in loops)
    for name in ("episode_return", "episode_length"):
        np.testing.assert_array_equal(first[name], second[name])
    assert set(map(type, seen)) == {torch.Tensor}
    monkeypatch.setattr(tensor, "arrays", None)
    timestep = loops[0].environment.reset()
    assert isinstance(policy.step(timestep.observation, policy.initial_state(3))[0], torch.Tensor)


PPO_SMALL = PPOConfig(unroll_length=8, epochs=1, minibatch_size=16, hidden_sizes=(8,), normalize_rewards=True)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_ppo_learns_the_same_from_tensors_as_from_arrays(name, monkeypatch):
    rows, taken, step = [], [], TensorDynamics.step
    monkeypatch.setattr(
        TensorDynamics, "step", lambda env, action: (taken.append(action), step(env, action))[1]
    )
    config = RunConfig(envs_per_actor=4, max_env_steps=150, evaluate_period=75, num_evaluation_episodes=3)
    for factory in (f"tensor:{name}", functools.partial(_as_arrays, name)):
        result = launch.launch(make_program(PPO(PPO_SMALL), factory, config), engine="serial")
        rows.append({key: result[key] for key in ("env_steps", "learner_steps", "episode_return")})
        rows[-1]["acts"] = sum(isinstance(action, torch.Tensor) for action in taken) > 35
        taken.clear()
    assert [row.pop("acts") for row in rows] == [True, False]
    assert rows[0] == rows[1] and rows[0]["env_steps"] == 150


def _as_arrays(name, num_envs=1, seed=None):
    return tensor.as_arrays(environments.make(f"tensor:{name}", num_envs=num_envs, seed=seed))


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_a_gpu
@pytest.mark.parametrize("kind", [CartPole, Pendulum])
def test_episodes_on_a_gpu_are_those_of_the_cpu(kind):
    here, there = (kind(64, seed=1, device=device, max_episode_steps=9) for device in ("cpu", "cuda"))
    rng = np.random.default_rng(0)
    for _ in range(30):
        chosen = actions(here, rng)
        expected, found = here.step(chosen), there.step(chosen.cuda())
        assert all(leaf.device == there.device for leaf in found)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other.cpu(), one, rtol=1e-5, atol=1e-6)


@on_a_gpu
@pytest.mark.parametrize("recurrent", [None, "lstm"])
def test_ppo_acts_on_the_gpu_of_its_environment(recurrent, monkeypatch):
    seen, act = set(), PPOPolicy.act

    def watched(policy, observation, state):
        seen.add((observation.device.type, policy.device.type))
        return act(policy, observation, state)

    monkeypatch.setattr(PPOPolicy, "act", watched)
    agent = PPO(dataclasses.replace(PPO_SMALL, device="cuda", recurrent=recurrent))
    settings = RunConfig(
        envs_per_actor=4, max_env_steps=150, evaluate_period=None, environment_options={"device": "cuda"}
    )
    result = launch.launch(make_program(agent, "tensor:Pendulum-v1", settings), engine="serial")
    assert result["learner_steps"] > 3 and seen == {("cuda", "cuda")}
