"""Nested spaces, Discrete spaces that start elsewhere than at 0, nested rewards."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from framework import environments


class _Nested(gymnasium.Env):
    """Observes the action taken, through spaces of every kind."""

    observation_space = spaces.Dict(
        {
            "seen": spaces.Discrete(3, start=10),
            "both": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.MultiDiscrete([2, 3]))),
        }
    )
    action_space = spaces.Dict({"pick": spaces.Discrete(3, start=-1), "push": spaces.Box(-1, 1, (2,))})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(-1, np.zeros(2)), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self._observe(action["pick"], action["push"]), float(action["pick"]), False, False, {}

    def _observe(self, pick, push):
        observation = {
            "seen": np.int64(pick + 11),
            "both": (np.asarray(push, np.float64), np.array([1, 2], np.int64)),
        }
        assert self.observation_space.contains(observation)
        return observation


class _Unsigned(gymnasium.Env):
    observation_space = spaces.Discrete(3, start=1, dtype=np.uint8)
    action_space = spaces.Discrete(2, start=1, dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        return np.uint8(1), {}

    def step(self, action):
        return np.uint8(action + 1), 0.0, False, False, {}


def _vector():
    return gymnasium.vector.SyncVectorEnv([_Unsigned, _Unsigned])


@pytest.mark.parametrize("factory", [_Unsigned, _vector])
def test_discrete_starts_of_unsigned_dtypes(factory):
    environment = environments.make(factory, num_envs=2)
    assert environment.reset().observation.tolist() == [0, 0]
    assert environment.step(np.array([1, 0])).observation.tolist() == [2, 1]
    assert [found.where for found in environments.check_environment(_Unsigned, num_steps=5)] == ["episodes"]


def test_a_nested_action_with_a_part_missing_is_refused():
    environment = environments.make(_Nested)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match="lacks a part of the action spec"):
        environment.step({"pick": np.array([0])})


def test_an_environment_registered_here_works_in_processes():
    gymnasium.register("Nested-v0", entry_point=_Nested)
    try:
        with environments.make("gymnasium:Nested-v0", stepping="processes") as environment:
            assert environment.reset().observation["seen"].tolist() == [0]
    finally:
        gymnasium.registry.pop("Nested-v0")
