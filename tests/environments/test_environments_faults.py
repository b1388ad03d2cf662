"""Environments and actions that break the contract: each is one error that names the place."""

import contextlib
import functools
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import tree
from faulty_environment import FaultyEnvironment
from gymnasium import spaces

from framework import core, environments, specs
from framework.actors import EnvironmentLoop
from framework.environments import testing
from framework.environments.fields import FieldChecker

CARTPOLE = "gymnasium:CartPole-v1"


def _few(stepping):
    return {"num_processes": 2} if stepping == "processes" else {}


_FAULTS = {
    "raise": r"FaultyEnvironment, env 0: step\(1\) raised RuntimeError: the simulator exploded",
    "nan_observation": r"FaultyEnvironment, env 0: observation holds NaN",
    "nan_reward": r"FaultyEnvironment, env 0: reward holds NaN",
    "shape": r"FaultyEnvironment, env 0: observation has shape \(2,\), expected \(1,\)",
    "dtype": r"FaultyEnvironment, env 0: observation has dtype <U1.*, expected float32\.",
}


@pytest.mark.parametrize(
    ("fault", "stepping"),
    [*((fault, "inline") for fault in _FAULTS), ("nan_reward", "processes")],
)
def test_a_fault_in_mid_episode_names_environment_env_and_field(fault, stepping):
    with environments.make(
        FaultyEnvironment, num_envs=2, stepping=stepping, options={"fault": fault}, **_few(stepping)
    ) as environment:
        environment.reset()
        for _ in range(2):
            environment.step(np.array([1, 1]))
        with pytest.raises(environments.EnvironmentFault, match=_FAULTS[fault]):
            environment.step(np.array([1, 1]))


def test_the_faulty_env_is_named_not_the_first():
    built = []

    def make():
        built.append(None)
        return FaultyEnvironment("nan_observation", at=9 if len(built) < 3 else 2)

    environment = environments.make(make, num_envs=3)
    environment.reset()
    environment.step(np.zeros(3, np.int64))
    with pytest.raises(environments.EnvironmentFault, match="env 2"):
        environment.step(np.zeros(3, np.int64))


class _MoreDigits(testing.EchoEnvironment):
    """float32 at the first observation, then `dtype`."""

    def __init__(self, dtype="float64", more=0):
        super().__init__(episode_length=9)
        self._more = np.array(more, dtype)

    def step(self, action):
        timestep = super().step(action)
        return timestep._replace(observation=timestep.observation.astype(self._more.dtype) + self._more)


@pytest.mark.parametrize(
    ("dtype", "more", "is_rounded"),
    [("float64", 0, True), ("float32", 0, False), ("int64", 0, False), ("int64", 2**30 + 1, True)],
)
def test_observations_that_are_rounded_cause_one_warning(dtype, more, is_rounded):
    environment = environments.make(_MoreDigits, num_envs=2, options={"dtype": dtype, "more": more})
    environment.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert environment.step(np.zeros(2, np.int64)).observation.dtype == np.float32
    expected = f"_MoreDigits: observation has dtype {dtype}, expected float32"
    assert [expected in str(warning.message) for warning in caught] == [True] * is_rounded


class _Odd(testing.EchoEnvironment):
    """Replaces fields of its first time step."""

    def __init__(self, **changes):
        super().__init__(episode_length=9)
        self._changes = changes

    def step(self, action):
        changes, self._changes = self._changes, {}
        return super().step(action)._replace(**changes)


_ODD = {
    "None": ({"reward": None}, r"reward has dtype object \(None\), expected one number"),
    "number as text": ({"reward": "1"}, r"reward has dtype <U1 \('1'\), expected one number"),
    "bytes": ({"reward": b"1"}, "reward has dtype .S1"),
    "complex": ({"reward": 1j}, "reward has dtype complex128"),
    "array": ({"reward": np.zeros(2)}, r"reward has shape \(2,\), expected one number"),
    "beyond float32": ({"reward": 1e39}, r"reward is .*1e\+39.*, beyond float32"),
    "discount of None": ({"discount": None}, r"discount has dtype object \(None\)"),
    "large discount": ({"discount": 1.5}, r"discount is .*1\.5.*, outside 0\.0 \.\.\. 1\.0"),
    "negative discount": ({"discount": -1}, r"discount is .*-1\)?, outside"),
    "NaN discount": ({"discount": float("nan")}, "discount holds NaN"),
    "no LAST": ({"step_type": 0}, "returned FIRST although the previous step was not LAST"),
    "step type": ({"step_type": 3}, "returned step_type 3, expected MID or LAST"),
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("changes", "message"), _ODD.values(), ids=_ODD)
def test_a_value_that_would_change_is_named(changes, message):
    environment = environments.make(_Odd, num_envs=2, options=changes)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=f"_Odd, env 0: .*{message}"):
        environment.step(np.zeros(2, np.int64))


class _Gym(gymnasium.Env):
    """Replaces what its calls return."""

    observation_space = spaces.Dict(
        {"code": spaces.Discrete(3, start=2), "counts": spaces.MultiDiscrete([2, 2])}
    )
    action_space = spaces.Discrete(2)

    def __init__(
        self, code=2, counts=(0, 1), reward=1.0, terminated=False, reset=None, step=None, error=None
    ):
        self.observation = {"code": code, "counts": np.array(counts)}
        self.reset_result, self.step_result, self.error = reset, step, error
        self.result = self.observation, reward, terminated, False, {}

    def reset(self, *, seed=None, options=None):
        ok = {"code": 2, "counts": np.zeros(2, np.int64)}
        return (ok, {}) if self.reset_result is None else self.reset_result

    def step(self, action):
        if self.error is not None:
            raise self.error
        return self.result if self.step_result is None else self.step_result


class _Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


_GYM = {
    "code above": ({"code": 5}, r"observation/code is .*3.*, outside 0 \.\.\. 2"),
    "code below": ({"code": 1}, r"observation/code is .*-1.*, outside 0 \.\.\. 2"),
    "flag as text": ({"terminated": "False"}, r"terminated.*'False'\)?, expected a bool"),
    "old reset": ({"reset": np.zeros(4)}, r"reset\(\) returned ndarray of shape \(4,\), expected the pair"),
    "old step": ({"step": ({}, 1.0, False, {})}, r"step\(.*\) returned tuple of 4 values, expected \(obs"),
    "no text": ({"error": _Unprintable()}, r"step\(.*\) raised _Unprintable: "),
}


_X = np.zeros(2, np.float32)
_STRUCTURE = {
    "none": (None, r"env 0: observation is None, expected a nest with the parts inner, pair\."),
    "array": (_X, r"observation is array.*, expected a nest with the parts inner, pair\."),
    "inner is None": (
        {"inner": None, "pair": (1, 2)},
        "observation/inner is None, expected a nest with .* x",
    ),
    "leaf is None": ({"inner": {"x": None}, "pair": (1, 2)}, r"inner/x has dtype object \(None\), expected"),
    "missing": ({"inner": {"x": _X}}, r"/pair is missing from {'inner': {'x': 'ndarray'}}, which"),
}
_EXTRA = {
    "key": ({"inner": {"x": _X}, "pair": (1, 2), "info": 3}, "got the parts info, expected none"),
    "inner key": ({"inner": {"x": _X, "y": {"z": 0}}, "pair": (1, 2)}, "got the parts inner/y,"),
    "tuple": (
        {"inner": {"x": _X}, "pair": (1, 2, 3)},
        "the parts pair/2, .* inner/x, pair/0, pair/1:",
    ),
}


class _Nest(gymnasium.Env):
    """Its observation is a nest at the reset, and what it is told at its first step."""

    _pair = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(4)))
    observation_space = spaces.Dict({"inner": spaces.Dict({"x": spaces.Box(-1, 1, (2,))}), "pair": _pair})
    action_space = spaces.Discrete(2)

    def __init__(self, observation):
        self.observation = observation

    def reset(self, *, seed=None, options=None):
        return {"inner": {"x": [0.0, 0.0]}, "pair": (1, 2)}, {}

    def step(self, action):
        return self.observation, 0.0, False, False, {}


@pytest.mark.parametrize(("observation", "message"), _STRUCTURE.values(), ids=_STRUCTURE)
def test_an_observation_of_another_structure_is_told(observation, message):
    environment = environments.make(_Nest, num_envs=2, options={"observation": observation})
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=message):
        environment.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("observation", "message"), _EXTRA.values(), ids=_EXTRA)
def test_parts_that_the_spec_lacks_are_told_once(observation, message, batched):
    class Foreign(environments.EnvironmentWrapper):
        def step(self, action):
            given = tree.map_structure(lambda leaf: np.stack([leaf] * 2), observation)
            return super().step(action)._replace(observation=given)

    given = {"inner": {"x": _X}, "pair": (1, 2)} if batched else observation
    wrappers = [Foreign] if batched else []
    environment = environments.make(_Nest, num_envs=2, options={"observation": given}, wrappers=wrappers)
    environment.reset()
    with pytest.warns(UserWarning, match=message) as told:
        for _ in range(2):
            assert sorted(environment.step(np.zeros(2, np.int64)).observation) == ["inner", "pair"]
    assert len(told) == 1
    assert any(
        "parts that its spec lacks" in each.what
        for each in environments.check_environment(functools.partial(_Nest, observation), num_steps=3)
    )


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(("changes", "message"), _GYM.values(), ids=_GYM)
def test_what_gymnasium_calls_return_is_checked(changes, message, vector):
    make_one = functools.partial(_Gym, **changes)

    def make_vector(num_envs):
        batch, one = _vector(_Gym, num_envs), make_one()
        if one.error is not None or "code" in changes:
            batch.envs[0] = one
        if one.reset_result is not None:
            batch.reset = lambda **_: one.reset_result
        stepped, flags = batch.step, np.zeros(num_envs, np.bool_)
        if "terminated" in changes:
            batch.step = lambda action: (*stepped(action)[:2], np.array(["False"] * num_envs), flags, {})
        if one.step_result is not None:
            batch.step = lambda _: one.step_result
        return batch

    environment = environments.make(make_vector if vector else make_one, num_envs=2)
    with pytest.raises(environments.EnvironmentFault, match=message):
        environment.reset()
        environment.step(np.zeros(2, np.int64))


def test_integers_beyond_their_bounds_that_are_no_codes_are_told_once():
    environment = environments.make(functools.partial(_Gym, counts=(0, 2)), num_envs=2)
    environment.reset()
    with pytest.warns(
        UserWarning, match=r"env 0: observation/counts is .*outside \[0 0\] \.\.\. \[1 1\]"
    ) as told:
        for _ in range(2):
            environment.step(np.zeros(2, np.int64))
    assert len(told) == 1


_INTEGERS = {  # The spec's dtype, what the environment gives, and whether it arrives unchanged.
    "300 in uint8": ("uint8", np.int64(300), False),
    "negative in uint8": ("uint8", np.int64(-1), False),
    "200 in int8": ("int8", np.int64(200), False),
    "large in int32": ("int32", np.int64(2**40), False),
    "large in int64": ("int64", np.uint64(2**64 - 1), False),
    "negative in uint64": ("uint64", np.int64(-1), False),
    "a float in uint8": ("uint8", 1.5, False),
    "a whole float in uint8": ("uint8", 2.0, False),
    "2 in bool": ("bool", np.int64(2), False),
    "255 in uint8": ("uint8", np.int64(255), True),
    "int8 in int64": ("int64", np.int8(-5), True),
    "1 in bool": ("bool", np.int64(1), True),
    "300 in float32": ("float32", np.int64(300), True),
}


@pytest.mark.parametrize("field", ["observation", "action", "reward"])
@pytest.mark.parametrize(("dtype", "given", "fits"), _INTEGERS.values(), ids=_INTEGERS)
def test_integers_arrive_unchanged_or_are_refused(field, dtype, given, fits):
    """One of three numbers is the odd one, in a batch and in one env's array."""
    array = np.array([0, given, 1], getattr(given, "dtype", None))
    batch, of_one = (
        FieldChecker("e", field, specs.Array(shape, dtype), n) for shape, n in (((), 3), ((3,), 1))
    )
    for check in (
        lambda: batch(array),
        lambda: batch.gather(list(array), range(3)),
        lambda: of_one(array[None]),
    ):
        if fits:
            (arrived,) = check()
            assert arrived.dtype == dtype and np.array_equal(arrived.ravel(), array)
        else:
            with pytest.raises(environments.EnvironmentFault, match=f"dtype .*, expected {dtype}"):
                check()


_LARGE = 50331651.0  # 3 * 2**24 + 3, which float32 holds as 50331652.


@pytest.mark.parametrize("how", ["inline", "vector", "processes", "repeated", "wrapped", "batch of one"])
def test_returns_are_sums_of_what_the_environment_gave(how):
    make, wrappers = _Rewards, []
    if how == "vector":
        make = functools.partial(_vector, _Rewards)
    if how == "repeated":
        wrappers = [functools.partial(environments.ActionRepeat, num_repeats=2)]
    if how == "wrapped":
        wrappers = [type("Foreign", (environments.EnvironmentWrapper,), {})]
    if how == "batch of one":
        make = functools.partial(environments.make, _Rewards)
    stepping = {"stepping": "processes", "num_processes": 1} if how == "processes" else {}
    with environments.make(make, num_envs=2, wrappers=wrappers, **stepping) as environment:
        loop = EnvironmentLoop(environment, _Zeros())
        told = pytest.warns(UserWarning, match="float32 holds as 5033165")
        with contextlib.nullcontext() if stepping else told:
            assert loop.run_episodes(2)["episode_return"].tolist() == [0.1 + _LARGE] * 2


def _vector(make_one, num_envs):
    return gymnasium.vector.SyncVectorEnv([make_one] * num_envs)


class _Rewards(_Gym):
    script = (0.1, 0.0, 0.0, _LARGE)

    def __init__(self):
        super().__init__()

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return super().reset()

    def step(self, action):
        self.time += 1
        return self.observation, self.script[self.time - 1], False, self.time == len(self.script), {}


class _Zeros(core.Actor):
    def select_action(self, observation):
        return np.zeros(2, np.int64)

    def observe_first(self, timestep):
        pass

    observe = update = lambda self, *_: None


_BAD_ACTIONS = {
    "shape": (np.zeros((2, 1), np.int64), r"action has shape \(2, 1\), expected \(2,\)"),
    "envs": (np.zeros(3, np.int64), r"action has shape \(3,\), expected \(2,\)"),
    "range": (np.array([0, 2]), r"action of env 1 is .*2.* outside 0 \.\.\. 1"),
    "dtype": (np.array([0.0, 1.0]), "action has dtype float64, expected int64"),
}


@pytest.mark.parametrize("stepping", ["inline", "vector"])
@pytest.mark.parametrize(("action", "message"), _BAD_ACTIONS.values(), ids=_BAD_ACTIONS)
def test_an_action_that_does_not_fit_is_refused(action, message, stepping):
    environment = environments.make(CARTPOLE, num_envs=2, stepping=stepping)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=message):
        environment.step(action)
    assert environment.step(np.array([0, 1])).reward.tolist() == [1, 1]  # nothing was stepped


def test_a_nan_action_is_refused():
    environment = environments.make("gymnasium:Pendulum-v1", num_envs=2)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=r"action of env 1 is .*nan.*not finite"):
        environment.step(np.array([[0.0], [np.nan]], np.float32))


def test_envs_that_differ_are_refused():
    sizes = iter([3, 3, 4])

    def make():
        size = next(sizes)
        return testing.FakeEnvironment(testing.make_spec(specs.Array((size,), np.float32)))

    with pytest.raises(environments.EnvironmentFault, match="env 2"):
        environments.make(make, num_envs=3)


def test_close_closes_every_env_even_if_one_fails(caplog):
    closed = []

    class Closing(testing.EchoEnvironment):
        def __init__(self, seed):
            super().__init__()
            self._seed = seed

        def close(self):
            closed.append(self._seed)
            if len(closed) == 1:
                raise OSError("cannot close")
            if len(closed) == 2:
                sys.exit()  # As a game does after pygame.quit().

    environment = environments.make(Closing, num_envs=3, seed=0)
    environment.close()  # What was done before stays done.
    assert len(set(closed)) == 3
    assert "Closing, env 2: close() raised OSError: cannot close" in caplog.text


def test_a_step_after_close_says_so():
    environment = environments.make("gymnasium:CartPole-v1")
    environment.close()
    with pytest.raises(environments.EnvironmentFault, match="it is closed"):
        environment.reset()
