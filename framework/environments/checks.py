"""`check_environment`: steps an environment and reports violations of its contract, with a fix for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments import suites, testing
from framework.environments.single import call_factory


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
    """Plays random actions and returns all violations found; an empty list if there are none.

    ```python
    for violation in check_environment(MyEnvironment):
        print(violation)
    ```

    Args:
      environment: a name or a factory, as for `make`. Two environments are built, to compare them.
      num_steps: how many steps to play.
      seed: of the actions, and of both environments.
      options: keyword arguments of the factory.
    """
    source = suites.find(environment, dict(options or {}), None)
    report = _Report()
    try:
        built = [call_factory(source.make_one, seed, source.options) for _ in range(2)]
    except Exception as error:
        report.add(
            "constructor", f"raised {type(error).__name__}: {error}", "make it build with these options"
        )
        return report.violations
    try:
        adapters = [_adapt(one, report, seed) for one in built]
        first, second = adapters
        if first is not None and second is not None and _check_spec(first.spec, report):
            trace = _play(first, report, num_steps, seed)
            if trace is not None and not report.violations:
                _compare(trace, _play(second, _Report(), num_steps, seed), report)
    finally:
        for one in built:
            close = getattr(one, "close", None)
            if close is not None:
                close()
    return report.violations


class _Report:
    """Collects violations, each place once."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._seen: set[tuple[str, str]] = set()

    def add(self, where: str, what: str, fix: str) -> None:
        if (where, fix) not in self._seen:
            self._seen.add((where, fix))
            self.violations.append(Violation(where, what, fix))


class _Stop(Exception):
    """The environment is too broken to continue."""


class _Gymnasium:
    """Checks gymnasium's part of the contract, and returns (observation, reward, discount, over)."""

    def __init__(self, environment: Any, report: _Report, seed: int):
        self._environment = environment
        self._seed: int | None = seed
        self.report = report
        self.spec = specs.from_spaces(environment.observation_space, environment.action_space)
        self._offsets = specs.discrete_offsets(environment.observation_space)
        self._action_offsets = specs.discrete_offsets(environment.action_space)

    def reset(self) -> Any:
        seed, self._seed = self._seed, None
        try:
            result = self._environment.reset(seed=seed)
        except TypeError as error:
            self.report.add(
                "reset()", f"raised TypeError: {error}", "define reset(self, *, seed=None, options=None)"
            )
            raise _Stop from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            self.report.add(
                "reset()", f"returned {_describe(result)}", "return the pair (observation, info), info a dict"
            )
            raise _Stop
        return self._shift(result[0], self.spec.observations, self._offsets, -1)

    def step(self, action: Any) -> tuple[Any, Any, Any, bool]:
        action = self._shift(action, self.spec.actions, self._action_offsets, 1)
        result = self._environment.step(action)
        if not (isinstance(result, tuple) and len(result) == 5):
            self.report.add(
                "step()",
                f"returned {_describe(result)}",
                "return (observation, reward, terminated, truncated, info); the old 'done' is either "
                "terminated (no value after it) or truncated (a time limit)",
            )
            raise _Stop
        observation, reward, terminated, truncated, info = result
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                self.report.add(f"step().{name}", f"is {flag!r}, expected a bool", f"return bool({name})")
        if not isinstance(info, dict):
            self.report.add(
                "step().info", f"is {_describe(info)}, expected a dict", "return {} if there is none"
            )
        observation = self._shift(observation, self.spec.observations, self._offsets, -1)
        return observation, reward, 0.0 if terminated else 1.0, bool(terminated or truncated)

    def _shift(self, nest: Any, spec: Any, offsets: list[int], sign: int) -> Any:
        if not any(offsets):
            return nest
        values = [specs.pick(nest, path) for path, _ in specs.leaves(spec)]
        return nests.unflattener(spec)([v + sign * o for v, o in zip(values, offsets, strict=True)])


class _DmEnv:
    """Checks dm_env's part of the contract."""

    def __init__(self, environment: dm_env.Environment, report: _Report):
        self._environment = environment
        self.report = report
        self.spec = specs.make_environment_spec(environment)
        if repr(specs.make_environment_spec(environment)) != repr(self.spec):
            report.add("specs", "change from call to call", "compute the specs once, in the constructor")

    def reset(self) -> Any:
        timestep = self._environment.reset()
        self._check_type("reset()", timestep)
        if not timestep.first():
            self.report.add(
                "reset()",
                f"returned step_type {timestep.step_type!r}, expected FIRST",
                "return dm_env.restart(observation)",
            )
            raise _Stop
        return timestep.observation

    def step(self, action: Any) -> tuple[Any, Any, Any, bool]:
        timestep = self._environment.step(action)
        self._check_type("step()", timestep)
        if timestep.first():
            self.report.add(
                "step()",
                "returned FIRST although the step before was not LAST",
                "end an episode with dm_env.termination() or truncation(), begin the next one step later",
            )
            raise _Stop
        return timestep.observation, timestep.reward, timestep.discount, timestep.last()

    def _check_type(self, where: str, timestep: Any) -> None:
        if not isinstance(timestep, dm_env.TimeStep):
            self.report.add(
                where,
                f"returned {_describe(timestep)}",
                "return a dm_env.TimeStep (dm_env.restart, transition)",
            )
            raise _Stop


def _adapt(environment: Any, report: _Report, seed: int) -> _Gymnasium | _DmEnv | None:
    import gymnasium

    try:
        if isinstance(environment, gymnasium.Env):
            return _Gymnasium(environment, report, seed)
        if isinstance(environment, dm_env.Environment):
            return _DmEnv(environment, report)
    except specs.UnsupportedSpaceError as error:
        report.add("spaces", str(error).rstrip("."), "use a supported space, or wrap the environment")
        return None
    except AttributeError as error:
        report.add(
            "spaces", str(error), "set observation_space and action_space (or define the *_spec methods)"
        )
        return None
    report.add(
        "type",
        f"is {type(environment).__name__}, neither a gymnasium.Env nor a dm_env.Environment",
        "derive from one of the two",
    )
    return None


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
            elif field == "action" and leaf.dtype.kind == "f" and not _is_bounded(leaf):
                report.add(
                    where, f"has no finite bounds: {leaf}", "bound it, say to -1 ... 1, and scale inside"
                )
    return good


def _is_bounded(leaf: specs.Array) -> bool:
    return (
        isinstance(leaf, specs.BoundedArray)
        and bool(np.isfinite(leaf.minimum).all())
        and bool(np.isfinite(leaf.maximum).all())
    )


def _play(
    environment: _Gymnasium | _DmEnv, report: _Report, num_steps: int, seed: int
) -> list[tuple[str, Any]] | None:
    """Plays the environment. Returns the results as (call, nest) pairs; None if the environment broke."""
    rng = np.random.default_rng(seed)
    spec = environment.spec
    environment.report = report
    trace: list[tuple[str, Any]] = []
    over = True
    call = "reset()"
    try:
        for _ in range(num_steps):
            if over:
                call = "reset()"
                observation = environment.reset()
                over = False
            else:
                call = "step()"
                action = tree.map_structure(lambda leaf: testing.draw(leaf, rng), spec.actions)
                observation, reward, discount, over = environment.step(action)
                _check_values(report, "step().reward", spec.rewards, reward)
                _check_values(report, "step().discount", spec.discounts, discount)
                trace.append((call, np.array(reward, dtype=object)))
            _check_values(report, f"{call}.observation", spec.observations, observation)
            # A copy: environments may write into the same array again.
            trace.append((call, tree.map_structure(np.array, observation)))
    except _Stop:
        return None
    except Exception as error:
        report.add(
            call, f"raised {type(error).__name__}: {error}", "run it under a debugger with the same seed"
        )
        return None
    return trace


def _check_values(report: _Report, where: str, spec: Any, value: Any) -> None:
    for path, leaf in specs.leaves(spec):
        place = specs.path_name(where, path)
        try:
            array = np.asarray(specs.pick(value, path))
        except (KeyError, IndexError, TypeError):
            report.add(place, "is missing", "return every part that the spec has")
            continue
        expected = f"expected {leaf.dtype}{list(leaf.shape)}"
        python_number = isinstance(specs.pick(value, path), bool | int | float)
        if array.shape != leaf.shape:
            report.add(place, f"has shape {list(array.shape)}, {expected}", "make value and spec agree")
            continue
        if array.dtype.kind not in "biuf":
            report.add(place, f"is {_describe(value)}, {expected}", "return a number or an array of numbers")
            continue
        if "observation" in where and array.dtype != leaf.dtype and not python_number:
            report.add(
                place,
                f"has dtype {array.dtype}, {expected}",
                f"return it as {leaf.dtype}, or change the spec",
            )
        if not np.isfinite(array).all():
            report.add(place, f"is {array!r}", "return finite numbers; end the episode before it diverges")
        elif isinstance(leaf, specs.BoundedArray) and (
            (array < leaf.minimum).any() or (array > leaf.maximum).any()
        ):
            report.add(
                place,
                f"is {array!r}, outside {leaf.minimum} ... {leaf.maximum}",
                "clip it, or widen the bounds of the spec",
            )
    if not tree.is_nested(spec):
        return
    extra = {path for path, _ in specs.leaves(value)} - {path for path, _ in specs.leaves(spec)}
    if extra:
        names = ", ".join(sorted(specs.path_name("", path) for path in extra))
        report.add(where, f"has parts that its spec lacks: {names}", "add them to the spec or leave them out")


def _compare(trace: list[tuple[str, Any]], other: list[tuple[str, Any]] | None, report: _Report) -> None:
    for index, (call, value) in enumerate(trace):
        theirs = other[index][1] if other is not None and index < len(other) else None
        same = theirs is not None and all(
            np.array_equal(a, b) for a, b in zip(tree.flatten(value), tree.flatten(theirs), strict=True)
        )
        if not same:
            report.add(
                f"{call} at time step {index}",
                "two environments with the same seed and actions differ",
                "draw all random numbers from self.np_random (gymnasium, after super().reset(seed=seed)) or "
                "from a generator made of the factory's argument 'seed' (dm_env)",
            )
            return


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
