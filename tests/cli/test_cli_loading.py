"""Policies of runs, from Python: what they are given, and what they leave of the caller's."""

import dataclasses

import callers
import numpy as np
import pytest
import torch

from framework.datasets import record
from framework.programs import load_policy
from framework.runs.run_folder import RunError
from framework.types import FIRST


@pytest.mark.parametrize("name, environment", [("dqn", "CartPole-v1"), ("ppo", "FrozenLake-v1")])
def test_an_observation_without_envs_is_refused(make_run, name, environment):
    folder = make_run(steps=[10], agent=name, environment=f"gymnasium:{environment}")
    policy = load_policy(folder.path)
    spec = policy.spec.observations
    one = np.zeros(spec.shape, spec.dtype)
    assert len(policy(one[None])) == 1 and len(policy(np.stack([one, one, one]))) == 3
    assert len(policy([one.tolist()])) == 1
    shape = ", 4" if spec.shape else ","
    wrong = [
        (one, rf"expected \(1{shape}\), .* Add a batch dimension .* \[observation\]"),
        (one.tolist(), "Add a batch"),
        (one[None, None], rf"expected \(1{shape}\), one row for each env\.$"),  # No advice on B.
        (np.zeros((2, 7)), rf"got shape \(2, 7\), expected \(2{shape}\), one row for each env\.$"),
        (np.full((2, *one.shape), np.nan), "got nan, expected finite" if spec.shape else "got dtype float64"),
        (np.zeros((2, *spec.shape), complex), "got dtype complex128, expected"),
    ]
    for value, text in wrong:
        with pytest.raises(ValueError, match=text):
            policy(value)


@pytest.fixture
def with_memory(make_run):
    options = {"max_episode_steps": 3}
    return make_run(
        steps=[10], agent="r2d2", environment="gymnasium:CartPole-v1", environment_options=options
    ).path


def test_a_memory_restarts_with_the_episode_of_its_env(with_memory):
    policy, fresh = load_policy(with_memory), load_policy(with_memory)
    environment = policy.make_environment(num_envs=2)
    timestep, restarts = environment.reset(), 0
    for step in range(9):
        if step == 2:  # From here on, the envs begin at different times.
            begins = np.array([True, False])
            timestep = timestep._replace(step_type=np.where(begins, FIRST, timestep.step_type))
        policy(timestep.observation, timestep.first())
        memory = policy._state[1]
        for env in np.flatnonzero(timestep.first()):
            fresh.reset()
            fresh(timestep.observation[env : env + 1])
            torch.testing.assert_close([leaf[env] for leaf in memory], [leaf[0] for leaf in fresh._state[1]])
            restarts += step > 0
        timestep = environment.step(np.zeros(2, np.int64))
    assert restarts > 2
    with pytest.raises(ValueError, match=r"start_of_episode: got None, .* Pass timestep\.first\(\)"):
        policy(timestep.observation)
    with pytest.raises(ValueError, match="observation: got 1 envs, expected 2 as before"):
        policy(timestep.observation[:1], [True])


def test_a_memory_is_kept_until_reset_and_recording_restarts_it(with_memory):
    policy, seen = load_policy(with_memory), []
    one = np.full((1, 4), 0.1, np.float32)
    policy(one)
    first = policy._state[1]
    policy(one)
    assert not all(map(torch.equal, first, policy._state[1]))
    policy.reset()
    policy(one)
    assert all(map(torch.equal, first, policy._state[1]))

    step = policy._policy.step
    policy._policy.step = lambda observation, state: seen.append(state[1]) or step(observation, state)
    episodes = list(record(policy.make_environment(), policy, 2))
    begins = np.concatenate([each.start_of_episode[:-1] for each in episodes])
    assert begins.tolist() == [not any(leaf.any() for leaf in memory) for memory in seen]


def test_a_loaded_policy_acts_the_same_whatever_the_caller_sets_and_leaves_it(with_memory):
    def act():
        policy = load_policy(with_memory)
        environment, actor = policy.make_environment(num_envs=2), policy.make_actor(2)
        timestep, chosen = environment.reset(), []
        actor.observe_first(timestep)
        for _ in range(5):
            chosen += [policy(timestep.observation, timestep.first()).tolist()]
            action = actor.select_action(timestep.observation)
            timestep = environment.step(action)
            actor.observe(action, timestep)
        return chosen, [leaf.tolist() for leaf in policy._state[1]]

    expected = act()
    with callers.unusual_settings():
        before = callers.generators(), callers.settings()
        assert act() == expected
        assert (callers.generators(), callers.settings()) == before


def test_a_policy_is_loaded_without_its_simulator(make_run, monkeypatch):
    folder = make_run(steps=[10], agent="ppo", environment="gymnasium:CartPole-v1")

    def missing(*_, **__):
        raise ImportError("no such simulator")

    monkeypatch.setattr("framework.environments.make", missing)
    policy = load_policy(folder.path)
    assert policy(np.zeros((2, 4), np.float32)).shape == (2,)
    with pytest.raises(RunError, match="no such simulator"):
        policy.make_environment()


def test_an_environment_that_is_another_now_is_refused_when_it_is_made(make_run):
    folder = make_run(steps=[10], agent="ppo", environment="gymnasium:CartPole-v1")
    other = dataclasses.replace(folder, environment="gymnasium:Acrobot-v1")
    (folder.path / "config.yaml").unlink()
    other.save()
    with pytest.raises(RunError, match=r"not the one that the run was trained in: observations: got .*\[6\]"):
        load_policy(folder.path).make_environment()
