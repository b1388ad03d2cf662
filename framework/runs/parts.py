"""The parts of a program that `RunConfig` names: wrappers, observers, and loggers.

Each is a public name or `module:object`, with arguments where it needs some:

```python
RunConfig(
    wrappers=("StepLimit(limit=200)", "my_lab.wrappers:Noise(scale=0.1)"),
    observers=("ActionObserver",),
    loggers=("csv", "wandb(project='cartpole')"),
)
```
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from framework import actors, environments
from framework.actors import EnvironmentLoopObserver
from framework.actors.observers import InfoObserver
from framework.environments import BatchedEnvironment, EnvironmentWrapper
from framework.environments.suites import SUITES
from framework.loggers import (
    CSVLogger,
    Dispatcher,
    JSONLLogger,
    Logger,
    TensorBoardLogger,
    TerminalLogger,
    WandbLogger,
)
from framework.objects import named
from framework.runs.run_config import RunConfig
from launch import extras

# Engines, replay back ends and suites that need a package: its module, and how to install it.
_PACKAGES = {
    "ray": ("ray", extras.install("ray")),
    "launchpad": ("launchpad", extras.install("deepmind")),
    "launchpad_mt": ("launchpad", extras.install("deepmind")),
    "reverb": ("reverb", extras.install("reverb")),
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "wandb": ("wandb", extras.install("wandb")),
    **{name: (suite.package, extras.install(suite.extra)) for name, suite in SUITES.items() if suite.package},
}

Wrapper = Callable[[BatchedEnvironment], BatchedEnvironment]


def _public(module: ModuleType, base: type) -> dict[str, Any]:
    """The classes in a module that derive from `base` and can be made."""
    return {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base
        if not inspect.isabstract(kind)
    }


def _file(kind: Callable[..., Logger], name: str) -> Callable[..., Logger]:
    return lambda directory, **arguments: kind(os.path.join(directory, name), **arguments)


#: By name, `wrapper(environment, **arguments)`.
WRAPPERS: Mapping[str, Wrapper] = _public(environments, EnvironmentWrapper)
#: By name, `observer(**arguments)`.
OBSERVERS: Mapping[str, Callable[[], EnvironmentLoopObserver]] = _public(actors, EnvironmentLoopObserver)
#: By name, `logger(directory, **arguments)`.
LOGGERS: Mapping[str, Callable[..., Logger]] = {
    "csv": _file(CSVLogger, "metrics.csv"),
    "jsonl": _file(JSONLLogger, "metrics.jsonl"),
    "tensorboard": _file(TensorBoardLogger, "tensorboard"),
    "terminal": lambda directory, **arguments: TerminalLogger(**arguments),
    "wandb": WandbLogger,
}


def missing(name: str) -> str | None:
    """How to install the package that the engine, back end or suite `name` lacks; None if it lacks none."""
    module, advice = _PACKAGES.get(name, ("framework", ""))
    return advice if importlib.util.find_spec(module) is None else None


def wrappers_of(config: RunConfig) -> list[Wrapper]:
    """The wrappers that `config` names, innermost first. Raises ValueError for an unknown one."""
    return [named(text, WRAPPERS, "wrappers") for text in config.wrappers]


def make_observers(config: RunConfig) -> list[EnvironmentLoopObserver]:
    """New observers for one environment loop. Raises ValueError for an unknown one."""
    made = [named(text, OBSERVERS, "observers")() for text in config.observers]
    return [*made, InfoObserver(config.info_metrics)] if config.info_metrics else made


def make_logger(config: RunConfig) -> Logger | None:
    """The logger that writes a run's rows to its directory; None without a directory."""
    if config.directory is None:
        return None
    return Dispatcher([make(config.directory) for make in _loggers(config)])


def check_parts(config: RunConfig) -> None:
    """Raises ValueError if a part of `config` is unknown."""
    make_observers(config)
    if config.loggers and config.directory is None:
        raise ValueError(f"loggers: got {config.loggers} without a directory, expected (). Give directory.")
    _loggers(config)


def check_packages(config: RunConfig) -> None:
    """Raises ImportError if a logger or replay lacks its package."""
    loggers = [("loggers", text.partition("(")[0]) for text in config.loggers]
    for field, name in (("replay_backend", config.replay_backend), *loggers):
        if (advice := missing(name)) is not None:
            raise ImportError(f"{field}: {name!r} requires a package that is not installed: {advice}")


def _loggers(config: RunConfig) -> list[Callable[..., Logger]]:
    """`metrics.jsonl` first, which the commands read."""
    names = ["jsonl", *(name for name in config.loggers if name != "jsonl")]
    return [named(text, LOGGERS, "loggers") for text in names]
