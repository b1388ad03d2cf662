"""`check_environment`: steps an environment and reports violations of its contract, with a fix for each."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments import suites, testing
from framework.environments.base import LAST, BatchedEnvironment
from framework.environments.single import SingleEnv, call_factory, make_env
from framework.environments.stepping import VectorEnvironment
from framework.types import Nest
from launch.errors import message_of

# If no episode has ended, the check goes on for this many times `num_steps`, and at least this many steps.
_PATIENCE, _LEAST_PATIENCE = 9, 5_000


class Violation(NamedTuple):
    """One way in which an environment breaks its contract.

    Attributes:
      where: the call and field, such as `step().observation/camera`.
      what: what was found and what was expected.
      fix: what to change.
    """

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. Fix: {self.fix}."


def check_environment(
    environment: str | Callable[..., Any],
    *,
    num_steps: int = 500,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> list[Violation]:
    """Plays random legal actions and returns all violations found; an empty list if there are none.

    ```python
    for violation in check_environment(MyEnvironment):
        print(violation)
    ```

    Args:
      environment: a name or a factory, as for `make`. Two environments are built, to compare them.
      num_steps: number of steps to play. If no episode ends, it plays up to ten times as many, and
        at least 5,000, to see an end.
      seed: seed of the actions and of both environments.
      options: keyword arguments of the factory.
    """
    source = suites.find(environment, dict(options or {}), None)
    report = _Report()
    built: list[Any] = []
    try:
        for _ in range(2):
            built.append(call_factory(source.make_one, seed, source.options))
        first, second = [_adapt(one, report, seed) for one in built]
        if _check_spec(first.spec, report):
            trace, ended = _play(first, report, num_steps, seed)
            if not report.violations:
                _compare(trace, _play(second, _Report(), num_steps, seed)[0], report)
            if not ended:
                # Longer, since episodes of a few thousand steps are common.
                patience = max(_PATIENCE * num_steps, _LEAST_PATIENCE)
                _, ended = _play(first, _Report(), patience, seed, until_end=True)
            if not ended:
                report.add(
                    "episodes",
                    f"had no end after {patience:,} steps of random actions",
                    "end or truncate them (gymnasium.wrappers.TimeLimit, StepLimit), or give more num_steps: "
                    "returns are whole episodes', and evaluations cut them at max_evaluation_steps",
                )
    except _Broken as error:
        report.add(*error.args)
    except Exception as error:
        what = f"raised {_text(error)}"
        report.add("constructor", what, "make it build with these options")
    finally:
        for one in built:
            try:
                getattr(one, "close", lambda: None)()
            except Exception as error:
                report.add("close()", f"raised {_text(error)}", "release what is there, and raise nothing")
    return report.violations


class _Report:
    """Collects violations, each place once."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def add(self, where: str, what: str, fix: str) -> None:
        if (where, fix) not in [(violation.where, violation.fix) for violation in self.violations]:
            self.violations.append(Violation(where, what, fix))


class _Broken(Exception):
    """The environment is too broken to continue. Its arguments are a `Violation`'s."""


class _GymnasiumChecks:
    """Checks gymnasium's part of the contract, and returns (observation, reward, discount, over)."""

    def __init__(self, environment: Any, report: _Report, seed: int):
        self._environment, self._report = environment, report
        self._seed: int | None = seed
        self.spec = specs.from_spaces(environment.observation_space, environment.action_space)
        self._starts = specs.discrete_offsets(environment.observation_space)
        self._action_starts = specs.discrete_offsets(environment.action_space)

    def reset(self) -> Nest:
        seed, self._seed = self._seed, None
        try:
            result = self._environment.reset(seed=seed)
        except TypeError as error:
            fix = "define reset(self, *, seed=None, options=None)"
            raise _Broken("reset()", f"raised {_text(error)}", fix) from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            fix = "return the pair (observation, info), info a dict"
            raise _Broken("reset()", f"returned {_describe(result)}", fix)
        return _shift(result[0], self.spec.observations, self._starts, operator.sub)

    def step(self, action: Nest) -> tuple[Nest, Nest, Nest, bool]:
        result = self._environment.step(_shift(action, self.spec.actions, self._action_starts, operator.add))
        if not (isinstance(result, tuple) and len(result) == 5):
            raise _Broken(
                "step()",
                f"returned {_describe(result)}",
                "return (observation, reward, terminated, truncated, info); the old 'done' is either "
                "terminated (no value after it) or truncated (a time limit)",
            )
        observation, reward, terminated, truncated, info = result
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                self._report.add(f"step().{name}", f"is {flag!r}, expected a bool", f"return bool({name})")
        if not isinstance(info, dict):
            what = f"is {_describe(info)}, expected a dict"
            self._report.add("step().info", what, "return {} if there is none")
        observation = _shift(observation, self.spec.observations, self._starts, operator.sub)
        return observation, reward, 0.0 if terminated else 1.0, bool(terminated or truncated)


class _DmEnvChecks:
    """Checks dm_env's part of the contract."""

    def __init__(self, environment: dm_env.Environment, report: _Report):
        self._environment = environment
        self.spec = specs.make_environment_spec(environment)
        if repr(specs.make_environment_spec(environment)) != repr(self.spec):
            report.add("specs", "change from call to call", "compute the specs once, in the constructor")

    def reset(self) -> Nest:
        timestep = self._check("reset()", self._environment.reset())
        if not timestep.first():
            what = f"returned step_type {timestep.step_type!r}, expected FIRST"
            raise _Broken("reset()", what, "return dm_env.restart(observation)")
        return timestep.observation

    def step(self, action: Nest) -> tuple[Nest, Nest, Nest, bool]:
        timestep = self._check("step()", self._environment.step(action))
        if timestep.first():
            raise _Broken(
                "step()",
                "returned FIRST although the previous step was not LAST",
                "end an episode with dm_env.termination() or truncation(), begin the next one step later",
            )
        return timestep.observation, timestep.reward, timestep.discount, timestep.last()

    def _check(self, where: str, timestep: Any) -> dm_env.TimeStep:
        if not isinstance(timestep, dm_env.TimeStep):
            fix = "return a dm_env.TimeStep (dm_env.restart, transition)"
            raise _Broken(where, f"returned {_describe(timestep)}", fix)
        return timestep


class _Other:
    """Plays what has a `SingleEnv` of its own: PettingZoo's environments, and batches of one env."""

    def __init__(self, environment: SingleEnv):
        self._environment = environment
        self.spec = environment.spec

    def reset(self) -> Nest:
        return self._observed(self._environment.reset())

    def step(self, action: Nest) -> tuple[Nest, Nest, Nest, bool]:
        shifted = _shift(action, self.spec.actions, self._environment.action_starts, operator.add)
        observation, reward, discount, step_type = self._environment.step(shifted)
        return self._observed(observation), reward, discount, step_type == LAST

    def _observed(self, observation: Nest) -> Nest:
        return _shift(observation, self.spec.observations, self._environment.observation_starts, operator.sub)


def _shift(nest: Nest, spec: Nest, starts: Sequence[int], by: Callable[[Any, int], Any]) -> Nest:
    """Adds or subtracts the first value of each Discrete space."""
    if not any(starts):
        return nest
    values = [specs.pick(nest, path) for path, _ in specs.leaves(spec)]
    return nests.unflattener(spec)([by(v, start) for v, start in zip(values, starts, strict=True)])


def _adapt(environment: Any, report: _Report, seed: int) -> _GymnasiumChecks | _DmEnvChecks | _Other:
    import gymnasium  # 0.2 s

    try:
        if isinstance(environment, gymnasium.Env):
            return _GymnasiumChecks(environment, report, seed)
        if isinstance(environment, dm_env.Environment) and not isinstance(environment, BatchedEnvironment):
            return _DmEnvChecks(environment, report)
    except specs.UnsupportedSpaceError as error:
        what, fix = str(error).rstrip("."), "use a supported space, or wrap the environment"
        raise _Broken("spaces", what, fix) from error
    except AttributeError as error:
        fix = "set observation_space and action_space (or define the *_spec methods)"
        raise _Broken("spaces", str(error), fix) from error
    try:
        if isinstance(environment, gymnasium.vector.VectorEnv):
            environment = VectorEnvironment(type(environment).__name__, environment, seed)
        return _Other(make_env(environment, seed))
    except TypeError as error:
        what = f"is {type(environment).__name__}, neither a gymnasium.Env nor a dm_env.Environment"
        raise _Broken("type", what, "derive from one of the two") from error


def _check_spec(spec: specs.EnvironmentSpec, report: _Report) -> bool:
    good = True
    for field, nest in zip(("observation", "action", "reward", "discount"), spec, strict=True):
        for path, leaf in specs.leaves(nest):
            where = specs.path_name(f"{field}_spec()", path)
            if not isinstance(leaf, specs.Array):
                good = False
                report.add(where, f"is {_describe(leaf)}", "use dm_env.specs.Array and its subclasses")
            elif leaf.dtype.kind not in "biuf":
                good = False
                report.add(where, f"has dtype {leaf.dtype}", "use numbers: encode text and objects as arrays")
            elif field == "action" and leaf.dtype.kind == "f" and not specs.is_bounded(leaf):
                fix = "bound it, say to -1 ... 1, and scale inside"
                report.add(where, f"has no finite bounds: {leaf}", fix)
    return good


def _play(
    environment: _GymnasiumChecks | _DmEnvChecks | _Other,
    report: _Report,
    num_steps: int,
    seed: int,
    until_end: bool = False,
) -> tuple[list[tuple[str, Nest]], bool]:
    """Plays the environment. Returns the results as (call, nest) pairs, and whether an episode has ended.

    With `until_end`, it checks and returns no results, and stops at the end of an episode.
    """
    rng = np.random.default_rng(seed)
    spec = environment.spec
    trace: list[tuple[str, Nest]] = []
    over, call, ended = True, "reset()", False
    try:
        for _ in range(num_steps):
            call = "reset()" if over else "step()"
            if over:
                observation, over = environment.reset(), False
            else:
                action = _draw_action(spec, observation, rng)
                observation, reward, discount, over = environment.step(action)
                ended = ended or over
                if until_end:
                    if over:
                        break
                    continue
                _check_values(report, "step().reward", spec.rewards, reward)
                _check_values(report, "step().discount", spec.discounts, discount)
                # Copies: environments may write into the same arrays again.
                trace.append((call, tree.map_structure(np.array, reward)))
            _check_values(report, f"{call}.observation", spec.observations, observation)
            trace.append((call, tree.map_structure(np.array, observation)))
    except _Broken:
        raise
    except Exception as error:
        what = f"raised {_text(error)}"
        raise _Broken(call, what, "run it under a debugger with the same seed") from error
    return trace, ended


def _draw_action(spec: specs.EnvironmentSpec, observation: Nest, rng: np.random.Generator) -> Nest:
    """A random action, a legal one if the observation has a mask."""
    if agents := specs.agents(spec):
        return {name: _draw_action(specs.agent_spec(spec, name), observation[name], rng) for name in agents}
    action = tree.map_structure(lambda leaf: testing.draw(leaf, rng), spec.actions)
    mask, sizes = specs.action_mask(observation), specs.choices(spec.actions)
    legal = np.concatenate([np.zeros(0), *map(np.ravel, tree.flatten(mask))]) if mask is not None else ()
    if not sizes or len(legal) != sum(sizes):
        return action
    parts = np.split(legal, np.cumsum(sizes)[:-1])
    chosen = [rng.choice(np.flatnonzero(part > 0)) if (part > 0).any() else 0 for part in parts]
    leaves = tree.flatten(action)
    for index, leaf in enumerate(tree.flatten(spec.actions)):
        if count := len(specs.choices(leaf)):
            values, chosen = chosen[:count], chosen[count:]
            leaves[index] = (leaf.minimum + np.reshape(values, leaf.shape)).astype(leaf.dtype)
    return tree.unflatten_as(spec.actions, leaves)


def _check_values(report: _Report, where: str, spec: Nest, value: Nest) -> None:
    for path, leaf in specs.leaves(spec):
        place = specs.path_name(where, path)
        try:
            picked = specs.pick(value, path)
        except (KeyError, IndexError, TypeError):
            report.add(place, "is missing", "return every part that the spec has")
            continue
        array = np.asarray(picked)
        expected = f"expected {leaf.dtype}{list(leaf.shape)}"
        if array.shape != leaf.shape:
            report.add(place, f"has shape {list(array.shape)}, {expected}", "make value and spec agree")
            continue
        if array.dtype.kind not in "biuf":
            report.add(place, f"is {_describe(value)}, {expected}", "return a number or an array of numbers")
            continue
        # Python's numbers have no dtype of their own.
        own_dtype = "observation" in where and not isinstance(picked, bool | int | float)
        if own_dtype and array.dtype != leaf.dtype:
            fix = f"return it as {leaf.dtype}, or change the spec"
            report.add(place, f"has dtype {array.dtype}, {expected}", fix)
        if not np.isfinite(array).all():
            report.add(place, f"is {array!r}", "return finite numbers; end the episode before it diverges")
        elif isinstance(leaf, specs.BoundedArray) and (
            (array < leaf.minimum).any() or (array > leaf.maximum).any()
        ):
            what = f"is {array!r}, outside {leaf.minimum} ... {leaf.maximum}"
            report.add(place, what, "clip it, or widen the bounds of the spec")
    if tree.is_nested(spec):
        extra = {path for path, _ in specs.leaves(value)} - {path for path, _ in specs.leaves(spec)}
        if extra:
            names = ", ".join(sorted(specs.path_name("", path) for path in extra))
            what = f"has parts that its spec lacks: {names}"
            report.add(where, what, "add them to the spec or leave them out")


def _compare(trace: list[tuple[str, Nest]], other: list[tuple[str, Nest]], report: _Report) -> None:
    for index, ((call, mine), (other_call, theirs)) in enumerate(zip(trace, other, strict=False)):
        pairs = zip(tree.flatten(mine), tree.flatten(theirs), strict=True)
        if call != other_call or not all(np.array_equal(a, b) for a, b in pairs):
            report.add(
                f"{call} at time step {index}",
                "two environments with the same seed and actions differ",
                "draw all random numbers from self.np_random (gymnasium, after super().reset(seed=seed)) or "
                "from a generator made of the factory's argument 'seed' (dm_env)",
            )
            return


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {message_of(error)}"


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
