"""`check_environment`: steps an environment and reports violations of its contract, with a fix for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments import suites, testing
from framework.environments.base import LAST, UnexpectedReturn
from framework.environments.border import checked
from framework.environments.single import SingleEnv, call_factory, make_env
from framework.environments.stepping import VectorEnvironment
from framework.types import Nest
from launch.errors import message_of

# If no episode has ended, the check goes on until this many times `num_steps`, and at least this many steps:
# episodes of a few thousand steps are common.
_PATIENCE, _LEAST_PATIENCE = 10, 5_000


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
            built.append(call_factory(source.name, source.make_one, seed, source.options))
        first, second = [_single(one, seed) for one in built]
        if _check_spec(first.spec, report):
            patience = max(_PATIENCE * num_steps, _LEAST_PATIENCE)
            trace, ended = _play(first, report, num_steps, seed, patience)
            if not report:
                _compare(trace, _play(second, _Report(), num_steps, seed)[0], report)
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
    return list(report.values())


class _Report(dict[tuple[str, str], Violation]):
    """Collects violations, each place once."""

    def add(self, where: str, what: str, fix: str) -> None:
        self.setdefault((where, fix), Violation(where, what, fix))


class _Broken(Exception):
    """The environment is too broken to continue. Its arguments are a `Violation`'s."""


def _single(environment: Any, seed: int) -> SingleEnv:
    import gymnasium  # 0.2 s

    try:
        if isinstance(environment, gymnasium.vector.VectorEnv):
            environment = checked(VectorEnvironment(type(environment).__name__, environment, seed))
        return make_env(environment, seed)
    except (AttributeError, TypeError, specs.UnsupportedSpaceError) as error:
        fix = "return a gymnasium.Env, dm_env.Environment or pettingzoo.ParallelEnv with supported spaces"
        raise _Broken("environment", message_of(error).rstrip("."), fix) from error


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
    environment: SingleEnv, report: _Report, num_steps: int, seed: int, patience: int = 0
) -> tuple[list[tuple[str, Nest]], bool]:
    """Plays the environment. Returns the results as (call, nest) pairs, and whether an episode has ended.

    If none has, it plays up to `patience` steps, without a check of their results.
    """
    rng, spec = np.random.default_rng(seed), environment.spec
    # Values of a Discrete space count from its start.
    first_action, build_action = environment.action_starts, nests.unflattener(spec.actions)
    trace: list[tuple[str, Nest]] = []
    over, call, ended = True, "reset()", False
    try:
        for time in range(max(num_steps, patience)):
            if time >= num_steps and ended:
                break
            call = "reset()" if over else "step()"
            if over:
                observation, over = environment.reset(), False
            else:
                action = draw_legal_action(spec, observation, rng)
                if any(first_action):
                    values = [specs.pick(action, path) for path, _ in specs.leaves(spec.actions)]
                    action = build_action([v + first for v, first in zip(values, first_action, strict=True)])
                observation, reward, discount, step_type = environment.step(action)
                over = step_type == LAST
                ended = ended or over
                if time >= num_steps:
                    continue
                _check_values(report, "step().reward", spec.rewards, reward)
                _check_values(report, "step().discount", spec.discounts, discount)
                # Copies: environments may write into the same arrays again.
                trace.append((call, tree.map_structure(np.array, reward)))
            starts = environment.observation_starts
            _check_values(report, f"{call}.observation", spec.observations, observation, starts)
            trace.append((call, tree.map_structure(np.array, observation)))
    except UnexpectedReturn as error:
        raise _Broken(call, *error.args) from error
    except Exception as error:
        takes_no_seed = isinstance(error, TypeError) and over and "'seed'" in str(error)
        how = "define reset(self, *, seed=None, options=None)" if takes_no_seed else "run it under a debugger"
        raise _Broken(call, f"raised {_text(error)}", how) from error
    return trace, ended


def draw_legal_action(spec: specs.EnvironmentSpec, observation: Nest, rng: np.random.Generator) -> Nest:
    """A random action, a legal one if the observation has a mask."""
    if agents := specs.agents(spec):
        return {
            name: draw_legal_action(specs.agent_spec(spec, name), observation[name], rng) for name in agents
        }
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


def _check_values(report: _Report, where: str, spec: Nest, value: Nest, starts: Sequence[int] = ()) -> None:
    leaves = specs.leaves(spec)
    if tree.is_nested(spec) and not tree.is_nested(value):
        parts = ", ".join(specs.path_name("", path)[1:] for path, _ in leaves)
        report.add(where, f"is {_describe(value)}, expected {parts}", "return every part that the spec has")
        return
    for (path, leaf), start in zip(leaves, starts or [0] * len(leaves), strict=True):
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
            report.add(place, f"is {_describe(picked)}, {expected}", "return a number or an array of numbers")
            continue
        # Python's numbers have no dtype of their own.
        own_dtype = "observation" in where and not isinstance(picked, bool | int | float)
        if own_dtype and array.dtype != leaf.dtype:
            fix = f"return it as {leaf.dtype}, or change the spec"
            report.add(place, f"has dtype {array.dtype}, {expected}", fix)
        if not np.isfinite(array).all():
            report.add(place, f"is {array!r}", "return finite numbers; end the episode before it diverges")
        elif isinstance(leaf, specs.BoundedArray) and (
            (array < leaf.minimum + start).any() or (array > leaf.maximum + start).any()
        ):
            what = f"is {array!r}, outside {leaf.minimum} ... {leaf.maximum}"
            report.add(place, what, "clip it, or widen the bounds of the spec")
    if names := specs.extra_parts(spec, value):
        what = f"has parts that its spec lacks: {', '.join(names)}"
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
