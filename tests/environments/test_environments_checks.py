"""``check_environment`` finds each violation, and names its place and a fix."""

import dm_env
import gymnasium
import numpy as np
import pytest
from faulty_environment import FaultyEnvironment
from gymnasium import spaces
from helpers.two_agents import TwoAgents

from framework import specs
from framework.environments import check_environment, testing


class Good(gymnasium.Env):
    """A walk of ten steps; the cases below break one thing each."""

    observation_space = spaces.Dict(
        {"place": spaces.Box(-20, 20, (1,), np.float32), "time": spaces.Discrete(11)}
    )
    action_space = spaces.Discrete(2, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._time = float(self.np_random.uniform(-1, 1)), 0
        return self._observe(), {}

    def step(self, action):
        assert action in (1, 2)
        self._place += self.np_random.normal(0, 0.1) + 2 * action - 3
        self._time += 1
        return self._observe(), self._place, False, self._time == 10, {}

    def _observe(self):
        return {"place": np.array([self._place], np.float32), "time": self._time}


class OldReset(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class NoSeed(Good):
    def reset(self):
        return super().reset()


class OldStep(Good):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class Endless(Good):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def _observe(self):
        self._time = 0
        return np.array([self._place], np.float32)


class CloseRaises(Good):
    def close(self):
        raise OSError("gone")


class Changed(Good):
    def __init__(self, **changes):
        self._changes = changes

    def step(self, action):
        names = ("observation", "reward", "terminated", "truncated", "info")
        result = dict(zip(names, super().step(action), strict=True))
        return tuple((result | self._changes).values())


class Unseeded(Good):
    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed)
        self._place = np.random.default_rng().uniform(-1, 1)
        return self._observe(), info


class Talks(Good):
    observation_space = spaces.Text(4)


class Unbounded(Good):
    action_space = spaces.Box(-np.inf, np.inf, (1,))

    def step(self, action):
        return super().step(1)


_PLACE = np.zeros(1, np.float32)


def _changed(**changes):
    return lambda: Changed(**changes)


_CASES = {
    "reset returns no pair": (OldReset, "reset()", "return `observation, {}`"),
    "reset takes no seed": (NoSeed, "reset()", "define reset(self, *, seed=None, options=None)"),
    "step returns four": (OldStep, "step()", "truncated (a time limit)"),
    "flag is no bool": (_changed(terminated="no"), "step()", "Return True or False"),
    "reward is text": (_changed(reward="x"), "step().reward", "return a number"),
    "reward is an array": (_changed(reward=np.zeros(1)), "step().reward", "make value and spec agree"),
    "reward is NaN": (_changed(reward=np.nan), "step().reward", "finite"),
    "shape": (
        _changed(observation={"place": np.zeros(2, np.float32), "time": 1}),
        "step().observation/place",
        "make value and spec agree",
    ),
    "dtype": (
        _changed(observation={"place": np.zeros(1), "time": 1}),
        "step().observation/place",
        "return it as float32",
    ),
    "range": (_changed(observation={"place": _PLACE + 21, "time": 1}), "step().observation/place", "widen"),
    "missing part": (
        _changed(observation={"place": _PLACE}),
        "step().observation/time",
        "return every part that the spec has",
    ),
    "None": (_changed(observation=None), "step().observation", "return every part that the spec has"),
    "part too many": (
        _changed(observation={"place": _PLACE, "time": 1, "secret": 1}),
        "step().observation",
        "add them to the spec",
    ),
    "no end": (Endless, "episodes", "give more num_steps"),
    "close raises": (CloseRaises, "close()", "raise nothing"),
    "not reproducible": (Unseeded, "time step 0", "self.np_random"),
    "unsupported space": (Talks, "environment", "supported spaces"),
    "actions without bounds": (Unbounded, "action_spec()", "bound it"),
    "not an environment": (lambda: 3, "environment", "return a gymnasium.Env"),
    "raises": (lambda: FaultyEnvironment("raise"), "step()", "run it under a debugger"),
    "cannot be built": (lambda: 1 / 0, "constructor", "make it build"),
    "several envs": (lambda: gymnasium.vector.SyncVectorEnv([Good] * 2), "constructor", "make it build"),
}


@pytest.mark.parametrize("name", _CASES)
def test_a_violation_is_reported_with_its_place_and_fix(name):
    factory, where, fix = _CASES[name]
    violations = check_environment(factory, num_steps=50)
    assert violations
    assert where in violations[0].where
    assert fix in violations[0].fix
    assert violations[0].fix in str(violations[0])


class Picky(TwoAgents):
    """Each agent has several choices, of which its mask allows one value each."""

    MASK = np.array([0, 1, 0, 1, 0, 1, 0], bool)
    observation = {"action_mask": specs.Array((7,), bool)}
    action = {"a": specs.DiscreteArray(2), "b": specs.BoundedArray((2,), np.int64, [1, 0], [3, 1])}

    def reset(self):
        self.time = 0
        return dm_env.restart(self.of_both({"action_mask": self.MASK}))

    def step(self, action):
        for choices in action.values():
            assert (choices["a"], *choices["b"]) == (1, 2, 0)
        observation = self.of_both({"action_mask": self.MASK})
        self.time += 1
        kind = (
            dm_env.StepType.LAST if self.time == 300 else dm_env.StepType.MID
        )  # Later than the check needs.
        return dm_env.TimeStep(kind, self.of_both(0.0), self.of_both(1.0), observation)


@pytest.mark.parametrize(
    "environment",
    [
        Good,
        Picky,
        testing.MaskedEnvironment,
        testing.EchoEnvironment,
        testing.FakeEnvironment,
        testing.MemoryEnvironment,
        lambda: testing.FakeEnvironment(testing.make_spec(rewards={"a": specs.Array((2,), np.float32)})),
        "gymnasium:CartPole-v1",
        lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point"),
        lambda num_envs: gymnasium.vector.SyncVectorEnv([Good] * num_envs),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(environment):
    assert check_environment(environment, num_steps=60) == []


def test_each_violation_is_reported_once():
    both = _changed(reward=np.nan, observation={"place": _PLACE + 21, "time": 1})
    assert len(check_environment(both, num_steps=50)) == 2


def test_a_part_that_is_no_number_is_shown_alone():
    text = _changed(observation={"place": np.array(["x"]), "time": 1})
    assert "place: is ndarray array(['x'], dtype='<U1'), expected" in str(
        check_environment(text, num_steps=50)[0]
    )


def _odd(reset=lambda timestep: timestep, step=lambda timestep: timestep):
    class Odd(testing.EchoEnvironment):
        def reset(self):
            return reset(super().reset())

        def step(self, action):
            return step(super().step(action))

    return Odd


_MID, _FIRST = dm_env.StepType.MID, dm_env.StepType.FIRST
_ODD = {
    "not first": (_odd(lambda first: first._replace(step_type=_MID)), "reset()", "dm_env.restart"),
    "no time step": (_odd(step=lambda timestep: timestep[:3]), "step()", "dm_env.transition"),
    "observation only": (_odd(lambda first: first.observation), "reset()", "dm_env.restart"),
    "too soon": (
        _odd(step=lambda timestep: timestep._replace(step_type=_FIRST)),
        "step()",
        "End the episode with LAST",
    ),
    "discount": (_odd(step=lambda timestep: timestep._replace(discount=1.5)), "step().discount", "clip it"),
}


@pytest.mark.parametrize(("factory", "where", "fix"), _ODD.values(), ids=_ODD)
def test_violations_of_dm_env(factory, where, fix):
    violation = check_environment(factory, num_steps=20)[0]
    assert violation.where == where and fix in violation.fix
