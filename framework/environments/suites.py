"""Suites: the name of an environment, or a callable, becomes a `EnvironmentSource` of environments."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

from framework import config_checks
from framework.config_checks import nearest
from framework.environments import atari, constrained, goals, minatar, multi_agent, tasks, testing
from framework.environments.envpool import EnvPoolEnvironment
from framework.environments.remote import ExternalEnvironment, RemoteEnvironment
from framework.environments.single import SingleEnv, call_factory, make_env, takes
from framework.objects import load_callable, load_object
from launch import extras

GROUP = "repertory.environments"
Finder = Callable[[str, str, dict[str, Any]], "EnvironmentSource"]  # Gets its full name, NAME, and options.


@dataclasses.dataclass(frozen=True)
class EnvironmentSource:
    """Makes one environment, or B of them at once.

    Attributes:
      name: name in errors and logs.
      make_one: `make_one(**options)` returns one dm_env or gymnasium environment.
      options: keyword arguments of `make_one`.
      make_vector: `make_vector(num_envs, **options)` returns a gymnasium vector environment; None: there is
        none.
    """

    name: str
    make_one: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    make_vector: Callable[..., Any] | None = None

    def make_env(self, seed: int | None) -> SingleEnv:
        """One env."""
        return make_env(call_factory(self.name, self.make_one, seed, self.options), seed)


def find(
    environment: str | Callable[..., Any], options: dict[str, Any], render_mode: str | None
) -> EnvironmentSource:
    """The source that the first argument of `make` names; ValueError if there is none."""
    source = _find(environment, options)
    if render_mode is not None and (
        takes(source.make_one, "render_mode") or takes(source.make_one, "kwargs")
    ):
        return dataclasses.replace(source, options={**source.options, "render_mode": render_mode})
    return source


def _find(environment: str | Callable[..., Any], options: dict[str, Any]) -> EnvironmentSource:
    if callable(environment):
        name = getattr(environment, "__qualname__", None) or type(environment).__name__
        return EnvironmentSource(name, environment, options)
    if not isinstance(environment, str):
        raise TypeError(
            f"environment: got {environment!r}, expected a name such as 'gymnasium:CartPole-v1' or a "
            "callable that makes an environment. Pass the class or a function, not the instance."
        )
    suite, separator, name = environment.partition(":")
    if separator and suite in SUITES and name:
        _require(environment, SUITES[suite].package, SUITES[suite].extra)
        return SUITES[suite].find(environment, name, options)
    if separator and suite in (found := registered()) and name:
        make = load_callable(found[suite], f"{environment!r}: got the entry point {suite!r}", "a function")
        return EnvironmentSource(environment, functools.partial(make, name), options)
    reason = f" Did you mean 'gymnasium:{environment}'?"
    if separator and name:
        try:
            factory = load_object(environment)
        except (ImportError, AttributeError, ValueError) as error:
            reason = f" As module:object it cannot be imported: {error}.{nearest(suite, known_suites())}"
        else:
            if callable(factory):
                return dataclasses.replace(_find(factory, options), name=environment)
            reason = f" {environment!r} is {type(factory).__name__}, expected a class or a function."
    fix = "; ".join(f"{key}:{suite.example}" for key, suite in SUITES.items())
    raise ValueError(
        f"unknown environment {environment!r}; names look like {fix}; or module:object, which makes an "
        f"environment.{reason}"
    )


def registered() -> dict[str, str]:
    """`module:function` by the names of the entry points of installed packages that are no suite of ours.

    `function(name, num_envs, seed, **options)` makes all envs of `SUITE:NAME` as one `BatchedEnvironment`.
    """
    entries = metadata.entry_points(group=GROUP)
    return {entry.name: entry.value for entry in entries if entry.name not in SUITES}


def known_suites() -> list[str]:
    """The names of all suites."""
    return [*SUITES, *registered()]


def _require(full: str, package: str | None, extra: str) -> None:
    if package is not None and importlib.util.find_spec(package) is None:
        raise ImportError(f"{full!r} needs {package}, which is not installed. Run {extras.install(extra)}.")


def _unknown(full: str, known: Iterable[str]) -> ValueError:
    (suite, _, name), known = full.partition(":"), list(known)
    shown = ", ".join(f"{suite}:{each}" for each in known[:20]) + (", …" if len(known) > 20 else "")
    return ValueError(f"unknown environment {full!r}, expected one of {shown}.{nearest(name, known)}")


def _one_of(makers: Mapping[str, Callable[..., Any] | str]) -> Finder:
    """Of these callables, or their names `module:object`."""

    def find(full: str, name: str, options: dict[str, Any]) -> EnvironmentSource:
        if name not in makers:
            raise _unknown(full, makers)
        make = makers[name]
        return EnvironmentSource(full, load_object(make) if isinstance(make, str) else make, options)

    return find


def _any_of(kind: Callable[..., Any]) -> Finder:
    """Of a class whose first argument is the name."""
    return lambda full, name, options: EnvironmentSource(full, functools.partial(kind, name), options)


def module_of(environment: str) -> str | None:
    """The module that making this environment imports, beside its suite's; None if there is none."""
    suite, separator, name = environment.partition(":")
    if suite in registered() and suite not in SUITES:
        return None
    if suite == "gymnasium" or suite not in SUITES:
        return (name.rpartition(":")[0] if suite in SUITES else suite if separator else "") or None
    return name if suite == "pettingzoo" and _pettingzoo_module(name) == name else None


def _gymnasium(full: str, name: str, options: dict[str, Any]) -> EnvironmentSource:
    import gymnasium
    from gymnasium.error import Error

    module, separator, gymnasium_id = name.rpartition(":")
    try:
        if separator:
            importlib.import_module(module)
        spec = gymnasium.spec(gymnasium_id)
    except (Error, ImportError) as error:
        hints = {"ALE/": "Atari games are 'atari:GAME'", "MiniGrid-": "MiniGrid's tasks are 'minigrid:TASK'"}
        hint = next((f" {text} here." for start, text in hints.items() if gymnasium_id.startswith(start)), "")
        raise ValueError(
            f"unknown environment {full!r}: {error}{hint} (gymnasium.envs.registry lists the ids; write "
            "'gymnasium:module:Id' for one that is registered when a module is imported)"
        ) from error
    # The spec travels instead of the id, so that child processes need not have registered it, too.
    return EnvironmentSource(
        full,
        functools.partial(_make_gymnasium, spec),
        options,
        functools.partial(_make_gymnasium_vector, spec),
    )


def _make_gymnasium(spec: Any, **kwargs: Any) -> Any:
    import gymnasium
    from gymnasium.error import DependencyNotInstalled

    try:
        # The checker warns about style at every step; check_environment() reports violations once.
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except TypeError:
        if isinstance(spec.entry_point, str):
            creator = gymnasium.envs.registration.load_env_creator(spec.entry_point)
            config_checks.arguments(f"gymnasium:{spec.id}", creator, kwargs, more=["max_episode_steps"])
        raise
    except DependencyNotInstalled as error:
        # The entry point is gymnasium.envs.FAMILY...
        family = next((name for name in ("box2d", "mujoco") if f".{name}" in str(spec.entry_point)), None)
        advice = f": {error}" if family is None else f"; {extras.install(family)}"
        raise ImportError(f"'gymnasium:{spec.id}' needs what is not installed{advice}") from error


def _make_gymnasium_vector(spec: Any, num_envs: int, **options: Any) -> Any:
    import gymnasium

    how: dict[str, Any] = {"vectorization_mode": "vector_entry_point"}
    if spec.vector_entry_point is None or spec.additional_wrappers:
        mode = gymnasium.vector.AutoresetMode.NEXT_STEP
        how = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": mode}}
    elif (limit := options.pop("max_episode_steps", None)) is not None:
        # gymnasium.make() takes None (the default) and -1 (no limit), vector environments a number only.
        options["max_episode_steps"] = np.iinfo(np.int32).max if limit == -1 else limit
    return gymnasium.make_vec(spec, num_envs=num_envs, **how, **options)


def _make_dm_control(domain: str, task: str, seed: int | None = None, **task_options: Any) -> Any:
    from dm_control import suite

    return suite.load(domain, task, task_kwargs={**task_options, "random": seed})


def _dm_control(full: str, name: str, options: dict[str, Any]) -> EnvironmentSource:
    from dm_control import suite

    domain, _, task = name.partition("/")
    if (domain, task) not in suite.ALL_TASKS:
        known = sorted(suite.ALL_TASKS, key=lambda each: each[0] != domain)  # The domain comes first.
        raise _unknown(full, map("/".join, known))
    return EnvironmentSource(full, functools.partial(_make_dm_control, domain, task), options)


def _atari(full: str, name: str, options: dict[str, Any]) -> EnvironmentSource:
    # render() always works, whatever render_mode is.
    config_checks.names("AtariOptions", options, list(atari.AtariOptions.__dataclass_fields__))
    checked = atari.AtariOptions(**options)
    _require(full, None if checked.size is None else "cv2", "atari")
    return EnvironmentSource(full, functools.partial(atari.AtariEnvironment, name, checked))


def _minigrid(full: str, name: str, options: dict[str, Any]) -> EnvironmentSource:
    import gymnasium
    import minigrid  # noqa: F401  registers its ids

    task = name.removeprefix("MiniGrid-")
    known = [each.removeprefix("MiniGrid-") for each in gymnasium.registry if each.startswith("MiniGrid-")]
    found = [each for each in known if task in (each, each.rpartition("-v")[0])]
    if not found:
        raise _unknown(full, known)
    # A name without a version means the last one.
    spec = gymnasium.spec(f"MiniGrid-{max(found)}")
    return EnvironmentSource(full, functools.partial(_make_minigrid, spec), options)


def _robotics(full: str, name: str, options: dict[str, Any]) -> EnvironmentSource:
    import gymnasium
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    return dataclasses.replace(_gymnasium(f"gymnasium:{name}", name, options), name=full)


def _without_mission(observation: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in observation.items() if key != "mission"}


def _make_minigrid(spec: Any, **kwargs: Any) -> Any:
    import gymnasium
    from minigrid.core import constants

    environment = _make_gymnasium(spec, **kwargs)
    spaces = _without_mission(environment.observation_space)
    # MiniGrid's bound is 255. A cell is a kind of object, its color and, of a door, its state.
    codes = (constants.OBJECT_TO_IDX, constants.COLOR_TO_IDX, constants.STATE_TO_IDX)
    high = np.broadcast_to(np.array([max(each.values()) for each in codes], np.uint8), spaces["image"].shape)
    spaces["image"] = gymnasium.spaces.Box(np.zeros_like(high), high, dtype=np.uint8)
    return gymnasium.wrappers.TransformObservation(
        environment, _without_mission, gymnasium.spaces.Dict(spaces)
    )


def _pettingzoo_module(name: str) -> str:
    """PettingZoo's own module of an environment, or `name` if it has none."""
    # MPE has a package of its own since PettingZoo 1.25.
    own = f"mpe2{name[3:]}" if name.startswith("mpe.") else f"pettingzoo.{name}"
    try:
        return name if importlib.util.find_spec(own) is None else own
    except (ImportError, ValueError):
        return name


def _pettingzoo(full: str, name: str, options: dict[str, Any]) -> EnvironmentSource:
    module = _pettingzoo_module(name)
    try:
        makers = [getattr(importlib.import_module(module), each, None) for each in ("parallel_env", "env")]
        return EnvironmentSource(full, next(filter(callable, makers)), options)
    except (ModuleNotFoundError, StopIteration) as error:
        if isinstance(error, ModuleNotFoundError) and not module.startswith(error.name or module):
            raise ImportError(f"{full!r} needs {error.name}, which is not installed.") from error
        raise ValueError(
            f"unknown environment {full!r}: got no module pettingzoo.{name} or {name} with a function "
            "parallel_env or env. Write 'pettingzoo:mpe.simple_spread_v3', 'pettingzoo:classic.tictactoe_v3'."
        ) from error


def _badly_scaled(observation: np.ndarray) -> np.ndarray:
    return 1e4 + np.array([1e3, 1.0, 1e-3]) * observation


# Environments that hide the velocities or show them too small: the usual one, and what becomes of its
# observation.
_CHANGED: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "BadlyScaledPendulum": ("Pendulum-v1", _badly_scaled),
    "CartPoleWithoutVelocities": ("CartPole-v1", operator.itemgetter(slice(None, None, 2))),
    "PendulumWithoutVelocity": ("Pendulum-v1", operator.itemgetter(slice(None, 2))),
}


def _changed(usual: str, change: Callable[[np.ndarray], np.ndarray], **kwargs: Any) -> Any:
    import gymnasium

    environment: Any = _make_gymnasium(gymnasium.spec(usual), **kwargs)
    low, high = change(environment.observation_space.low), change(environment.observation_space.high)
    space = gymnasium.spaces.Box(low, high, dtype=low.dtype)
    return gymnasium.wrappers.TransformObservation(environment, change, space)


_TESTING: dict[str, Callable[..., Any]] = {
    "Echo": testing.EchoEnvironment,
    "Fake": testing.FakeEnvironment,
    "Masked": testing.MaskedEnvironment,
    "Memory": testing.MemoryEnvironment,
    "Sleep": testing.SleepEnvironment,
    "Tuple": testing.TupleEnvironment,
    **{name: functools.partial(_changed, *changed) for name, changed in _CHANGED.items()},
}


def options_in(
    directory: str | None, environment: str | Callable[..., Any], evaluation: bool = False
) -> dict[str, Any]:
    """Options of an environment in a run, such as the path of the file that its servers or clients need."""
    suite = environment.partition(":")[0] if isinstance(environment, str) else ""
    files = {"remote": ("key", "environments.key"), "external": ("token", "clients.token")}
    option, name = files.get(suite, ("", ""))
    found: dict[str, Any] = {option: os.path.join(directory, name)} if option and directory else {}
    return {**found, "evaluation": True} if suite == "external" and evaluation else found


class Suite(NamedTuple):
    """A suite.

    Attributes:
      find: finds the environment of a name.
      example: a name, for errors.
      package: the module that it needs; None: it needs none.
      extra: the extra of Repertory that installs that.
    """

    find: Finder
    example: str
    package: str | None = None
    extra: str = ""


_MINATAR = {
    name: functools.partial(minatar.MinAtarEnvironment, name)
    for name in (*minatar.GAMES, *minatar.GAMES.values())
}
_DYNAMICS = "framework.environments.tensor_dynamics"  # By name: torch takes a second to import.
_TENSOR = {"CartPole-v1": f"{_DYNAMICS}:CartPole", "Pendulum-v1": f"{_DYNAMICS}:Pendulum"}

_OWN_TASKS = {"PointMaze": goals.PointMaze, "WindingRoad": constrained.WindingRoad}

SUITES: dict[str, Suite] = {
    "gymnasium": Suite(_gymnasium, "CartPole-v1"),
    "dm_control": Suite(_dm_control, "cartpole/balance", "dm_control", "dm-control"),
    "atari": Suite(_atari, "Pong", "ale_py", "atari"),
    "minatar": Suite(_one_of(_MINATAR), "Breakout", "minatar", "minatar"),
    "minigrid": Suite(_minigrid, "DoorKey-5x5", "minigrid", "minigrid"),
    "robotics": Suite(_robotics, "FetchReach-v4", "gymnasium_robotics", "robotics"),
    "envpool": Suite(_any_of(EnvPoolEnvironment), "Pong-v5", "envpool", "envpool"),
    "pettingzoo": Suite(_pettingzoo, "mpe.simple_spread_v3", "pettingzoo", "pettingzoo"),
    "multi_agent": Suite(_one_of({"CartPole": multi_agent.MultiAgentCartPole}), "CartPole"),
    "tensor": Suite(_one_of(_TENSOR), "CartPole-v1"),
    "tasks": Suite(_one_of({**tasks.FAMILIES, **_OWN_TASKS}), "Navigation2D"),
    "remote": Suite(_any_of(RemoteEnvironment), "tcp://127.0.0.1:5555"),
    "external": Suite(_any_of(ExternalEnvironment), "tcp://127.0.0.1:5556"),
    "testing": Suite(_one_of(_TESTING), "Memory"),
}
