"""Suites: the name of an environment, or a callable, becomes a `EnvironmentSource` of environments."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from framework import config_checks
from framework.config_checks import nearest
from framework.environments import atari, minatar, multi_agent, tasks, testing
from framework.environments.single import SingleEnv, call_factory, make_env, takes
from framework.objects import load_object


@dataclasses.dataclass(frozen=True)
class EnvironmentSource:
    """Makes one environment, or B of them at once.

    Attributes:
      name: name in errors and logs.
      make_one: `make_one(**options)` returns one dm_env or gymnasium environment.
      options: keyword arguments of `make_one`.
      make_vector: `make_vector(num_envs)` returns a gymnasium vector environment; None if there is none.
      has_fast_vector: whether the vector environment computes all envs together instead of in a loop.
    """

    name: str
    make_one: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    make_vector: Callable[[int], Any] | None = None
    has_fast_vector: bool = False

    def make_env(self, seed: int | None) -> SingleEnv:
        """One env."""
        return make_env(call_factory(self.make_one, seed, self.options), seed)


def find(
    environment: str | Callable[..., Any], options: dict[str, Any], render_mode: str | None
) -> EnvironmentSource:
    """The source that the first argument of `make` names; ValueError if there is none."""
    if callable(environment):
        if render_mode is not None and (takes(environment, "render_mode") or takes(environment, "kwargs")):
            options = {**options, "render_mode": render_mode}
        name = getattr(environment, "__qualname__", None) or type(environment).__name__
        return EnvironmentSource(name, environment, options)
    if not isinstance(environment, str):
        raise TypeError(
            f"environment: got {environment!r}, expected a name such as 'gymnasium:CartPole-v1' or a "
            "callable that makes an environment. Pass the class or a function, not the instance."
        )
    suite, separator, name = environment.partition(":")
    if separator and suite in SUITES and name:
        return SUITES[suite][0](environment, name, options, render_mode)
    reason = f" Did you mean 'gymnasium:{environment}'?"
    if separator and name:
        try:
            factory = load_object(environment)
        except (ImportError, AttributeError, ValueError) as error:
            reason = f" As module:object it cannot be imported: {error}.{nearest(suite, SUITES)}"
        else:
            if callable(factory):
                return dataclasses.replace(find(factory, options, render_mode), name=environment)
            reason = f" {environment!r} is {type(factory).__name__}, expected a class or a function."
    fix = "; ".join(f"{key}:{example}" for key, (_, example) in SUITES.items())
    raise ValueError(
        f"unknown environment {environment!r}; names look like {fix}; or module:object, which makes an "
        f"environment.{reason}"
    )


def module_of(environment: str) -> str | None:
    """The module that making this environment imports, beside its suite's; None if there is none."""
    suite, separator, name = environment.partition(":")
    if suite == "gymnasium" or suite not in SUITES:
        return (name.rpartition(":")[0] if suite in SUITES else suite if separator else "") or None
    if suite == "pettingzoo":
        try:
            own = f"mpe2{name[3:]}" if name.startswith("mpe.") else f"pettingzoo.{name}"
            return None if importlib.util.find_spec(own) is not None else name
        except (ImportError, ValueError):
            return name
    return None


def _gymnasium(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
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
    if render_mode is not None:
        options = {**options, "render_mode": render_mode}
    fast = spec.vector_entry_point is not None and not spec.additional_wrappers
    # The spec travels instead of the id, so that child processes need not have registered it, too.
    return EnvironmentSource(
        full,
        functools.partial(_make_gymnasium, spec),
        options,
        functools.partial(_make_gymnasium_vector, spec, options),
        # Some ids (phys2d) have a vector version for JAX only, which stepping="vector" selects explicitly.
        has_fast_vector=fast and "jax" not in str(spec.vector_entry_point).lower(),
    )


def _make_gymnasium(spec: Any, **options: Any) -> Any:
    import gymnasium
    from gymnasium.error import DependencyNotInstalled

    try:
        # The checker warns about style at every step; check_environment() reports violations once.
        return gymnasium.make(spec, disable_env_checker=True, **options)
    except TypeError:
        if isinstance(spec.entry_point, str):
            creator = gymnasium.envs.registration.load_env_creator(spec.entry_point)
            config_checks.arguments(f"gymnasium:{spec.id}", creator, options, more=["max_episode_steps"])
        raise
    except DependencyNotInstalled as error:
        # Its entry point is gymnasium.envs.FAMILY...
        family = next((name for name in ("box2d", "mujoco") if f".{name}" in str(spec.entry_point)), None)
        advice = f": {error}" if family is None else f"; pip install 'repertory[{family}]'"
        raise ImportError(f"'gymnasium:{spec.id}' needs what is not installed{advice}") from error


def _make_gymnasium_vector(spec: Any, options: dict[str, Any], num_envs: int) -> Any:
    import gymnasium

    how: dict[str, Any] = {"vectorization_mode": "vector_entry_point"}
    if spec.vector_entry_point is None or spec.additional_wrappers:
        mode = gymnasium.vector.AutoresetMode.NEXT_STEP
        how = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": mode}}
    elif "max_episode_steps" in options:
        # gymnasium.make() takes None (the default) and -1 (no limit), vector environments a number only.
        limit = options["max_episode_steps"]
        options = {key: value for key, value in options.items() if key != "max_episode_steps"}
        if limit is not None:
            options["max_episode_steps"] = np.iinfo(np.int32).max if limit == -1 else limit
    return gymnasium.make_vec(spec, num_envs=num_envs, **how, **options)


def _make_dm_control(domain: str, task: str, seed: int | None = None, **task_options: Any) -> Any:
    from dm_control import suite

    return suite.load(domain, task, task_kwargs={**task_options, "random": seed})


def _require(full: str, package: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{full!r} needs {package}, which is not installed. Run pip install {install}.")


def _dm_control(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    _require(full, "dm_control", "'repertory[dm-control]'")
    from dm_control import suite

    domain, _, task = name.partition("/")
    if (domain, task) not in suite.ALL_TASKS:
        tasks = ", ".join(f"{known}/{task}" for known, task in suite.ALL_TASKS if known == domain)
        domains = ", ".join(sorted({known for known, _ in suite.ALL_TASKS}))
        hint = nearest(name, [f"{known}/{task}" for known, task in suite.ALL_TASKS])
        known = f"tasks of {domain}: {tasks}" if tasks else f"domains: {domains}"
        raise ValueError(f"unknown environment {full!r}, expected dm_control:DOMAIN/TASK; {known}.{hint}")
    return EnvironmentSource(full, functools.partial(_make_dm_control, domain, task), options)


def _atari(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    # render() always works, whatever render_mode is.
    checked = atari.check_options(options)
    for package in ("ale_py",) if checked.size is None else ("ale_py", "cv2"):
        _require(full, package, "'repertory[atari]'")
    return EnvironmentSource(full, functools.partial(atari.AtariEnvironment, name, checked))


def _minatar(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    if name not in minatar.GAMES and name not in minatar.GAMES.values():
        raise ValueError(
            f"unknown environment {full!r}; MinAtar's games: {', '.join(minatar.GAMES)}."
            f"{nearest(name, minatar.GAMES)}"
        )
    _require(full, "minatar", "minatar")
    return EnvironmentSource(full, functools.partial(minatar.MinAtarEnvironment, name), options)


def _minigrid(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    _require(full, "minigrid", "'repertory[minigrid]' (on Python 3.11 and later)")
    import gymnasium
    import minigrid  # noqa: F401  registers its ids

    task = f"MiniGrid-{name.removeprefix('MiniGrid-')}"
    ids = [each for each in gymnasium.registry if each.startswith("MiniGrid-")]
    found = [each for each in ids if task in (each, each.rpartition("-v")[0])]
    if not found:
        known = [each.removeprefix("MiniGrid-") for each in ids]
        raise ValueError(
            f"unknown environment {full!r}, expected minigrid:TASK such as minigrid:DoorKey-5x5."
            f"{nearest(task.removeprefix('MiniGrid-'), known)}"
        )
    if render_mode is not None:
        options = {**options, "render_mode": render_mode}
    # A name without a version means the last one.
    return EnvironmentSource(full, functools.partial(_make_minigrid, gymnasium.spec(max(found))), options)


def _without_mission(observation: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in observation.items() if key != "mission"}


def _make_minigrid(spec: Any, **options: Any) -> Any:
    import gymnasium
    from minigrid.core import constants

    environment = _make_gymnasium(spec, **options)
    spaces = _without_mission(environment.observation_space)
    # Its own bound is 255. A cell is a kind of object, its color and, of a door, its state.
    codes = (constants.OBJECT_TO_IDX, constants.COLOR_TO_IDX, constants.STATE_TO_IDX)
    high = np.broadcast_to(np.array([max(each.values()) for each in codes], np.uint8), spaces["image"].shape)
    spaces["image"] = gymnasium.spaces.Box(np.zeros_like(high), high, dtype=np.uint8)
    return gymnasium.wrappers.TransformObservation(
        environment, _without_mission, gymnasium.spaces.Dict(spaces)
    )


def _pettingzoo(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    # MPE has a package of its own since PettingZoo 1.25.
    module = f"mpe2{name[3:]}" if name.startswith("mpe.") else name
    _require(full, "mpe2" if module.startswith("mpe2.") else "pettingzoo", "'repertory[pettingzoo]'")
    make_one = None
    for path in (f"pettingzoo.{module}", module):
        try:
            make_one = getattr(importlib.import_module(path), "parallel_env", None)
            break
        except ModuleNotFoundError as error:
            if not path.startswith(error.name or path):  # The module exists and needs another package.
                raise ImportError(f"{full!r} needs {error.name}, which is not installed.") from error
    if make_one is None:
        raise ValueError(
            f"unknown environment {full!r}: got no module pettingzoo.{module} or {module} with a function "
            "parallel_env. Write 'pettingzoo:mpe.simple_spread_v3' or 'pettingzoo:butterfly.pistonball_v6'."
        )
    if render_mode is not None:
        options = {**options, "render_mode": render_mode}
    return EnvironmentSource(full, make_one, options)


def _multi_agent(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    if name != "CartPole":
        raise ValueError(
            f"unknown environment {full!r}; there is multi_agent:CartPole.{nearest(name, ['CartPole'])}"
        )
    return EnvironmentSource(full, multi_agent.MultiAgentCartPole, options)


def _envpool(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    _require(full, "envpool", "'repertory[envpool]' (on Python 3.11 and later)")
    from framework.environments.envpool import EnvPoolEnvironment

    return EnvironmentSource(full, functools.partial(EnvPoolEnvironment, name), options)


# Environments that hide the velocities: the whole one, and the rest of its observation.
_HIDDEN = {
    "CartPoleWithoutVelocities": ("CartPole-v1", slice(None, None, 2)),  # position and angle
    "PendulumWithoutVelocity": ("Pendulum-v1", slice(None, 2)),  # cosine and sine of the angle
}


def _show(shown: slice, observation: np.ndarray) -> np.ndarray:
    return observation[..., shown]


def _hidden(whole: str, shown: slice, **options: Any) -> Any:
    import gymnasium

    environment: Any = gymnasium.make(whole, disable_env_checker=True, **options)
    box = environment.observation_space
    space = gymnasium.spaces.Box(box.low[shown], box.high[shown])
    return gymnasium.wrappers.TransformObservation(environment, functools.partial(_show, shown), space)


def _hidden_vector(whole: str, shown: slice, options: dict[str, Any], num_envs: int) -> Any:
    import gymnasium

    environment = _make_gymnasium_vector(gymnasium.spec(whole), options, num_envs)
    spaces = [
        gymnasium.spaces.Box(box.low[..., shown], box.high[..., shown])
        for box in (environment.observation_space, environment.single_observation_space)
    ]
    show = functools.partial(_show, shown)
    return gymnasium.wrappers.vector.TransformObservation(environment, show, *spaces)


def _testing(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    if name in _HIDDEN:
        if render_mode is not None:
            options = {**options, "render_mode": render_mode}
        make = functools.partial(_hidden, *_HIDDEN[name])
        if name != "CartPoleWithoutVelocities":  # The only one that gymnasium computes in batches.
            return EnvironmentSource(full, make, options)
        vector = functools.partial(_hidden_vector, *_HIDDEN[name], options)
        return EnvironmentSource(full, make, options, vector, has_fast_vector=True)
    kinds: tuple[type, ...] = (testing.EchoEnvironment, testing.FakeEnvironment, testing.MaskedEnvironment)
    kinds += (testing.MemoryEnvironment, testing.SleepEnvironment, testing.TupleEnvironment)
    known = {kind.__name__.removesuffix("Environment"): kind for kind in kinds}
    if name not in known:
        names = ", ".join(f"testing:{known_name}" for known_name in (*known, *_HIDDEN))
        raise ValueError(
            f"unknown environment {full!r}; there are {names}.{nearest(name, [*known, *_HIDDEN])}"
        )
    return EnvironmentSource(full, known[name], options)


def options_in(
    directory: str | None, environment: str | Callable[..., Any], evaluation: bool = False
) -> dict[str, Any]:
    """Options of an environment in a run, such as the path of the file that its servers or clients need."""
    suite = environment.partition(":")[0] if isinstance(environment, str) else ""
    files = {"remote": ("key", "environments.key"), "external": ("token", "clients.token")}
    option, name = files.get(suite, ("", ""))
    found: dict[str, Any] = {option: os.path.join(directory, name)} if option and directory else {}
    return {**found, "evaluation": True} if suite == "external" and evaluation else found


def _remote(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    from framework.environments.remote import RemoteEnvironment  # Imports pyzmq.

    return EnvironmentSource(full, functools.partial(RemoteEnvironment, name), options)


def _external(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    from framework.environments.external import ExternalEnvironment

    return EnvironmentSource(full, functools.partial(ExternalEnvironment, name), options)


def _tasks(full: str, name: str, options: dict[str, Any], render_mode: str | None) -> EnvironmentSource:
    if name not in tasks.FAMILIES:
        names = ", ".join(f"tasks:{known}" for known in tasks.FAMILIES)
        raise ValueError(f"unknown environment {full!r}; there are {names}.{nearest(name, tasks.FAMILIES)}")
    return EnvironmentSource(full, tasks.FAMILIES[name], options)


#: Per suite, the function that finds its environments and an example for errors.
SUITES: dict[str, tuple[Callable[[str, str, dict[str, Any], str | None], EnvironmentSource], str]] = {
    "gymnasium": (_gymnasium, "CartPole-v1"),
    "dm_control": (_dm_control, "cartpole/balance"),
    "atari": (_atari, "Pong"),
    "minatar": (_minatar, "Breakout"),
    "minigrid": (_minigrid, "DoorKey-5x5"),
    "envpool": (_envpool, "Pong-v5"),
    "pettingzoo": (_pettingzoo, "mpe.simple_spread_v3"),
    "multi_agent": (_multi_agent, "CartPole"),
    "tasks": (_tasks, "Navigation2D"),
    "remote": (_remote, "tcp://127.0.0.1:5555"),
    "external": (_external, "tcp://127.0.0.1:5556"),
    "testing": (_testing, "Memory"),
}
