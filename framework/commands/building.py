"""Builds a program from settings and checks all settings of a command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import tree

from framework import config_checks, core, specs
from framework.commands.options import CommandError, UsageError
from framework.programs import make
from framework.programs.run_config import RunConfig
from launch import Program
from launch.engines.base import ENGINES
from launch.running import make_options

# Engines, replay back ends and suites that need a package: its module, and how to install it.
_PACKAGES = {
    "ray": ("ray", 'pip install "repertory[ray]"'),
    "launchpad": ("launchpad", 'pip install "repertory[deepmind]", on Python 3.10'),
    "launchpad_mt": ("launchpad", 'pip install "repertory[deepmind]", on Python 3.10'),
    "reverb": ("reverb", 'pip install "repertory[reverb]", on Python 3.11 or older'),
    "atari": ("ale_py", 'pip install "repertory[atari]"'),
    "dm_control": ("dm_control", 'pip install "repertory[dm-control]"'),
    "wandb": ("wandb", 'pip install "repertory[wandb]"'),
    "minatar": ("minatar", 'pip install "repertory[minatar]"'),
    "minigrid": ("minigrid", 'pip install "repertory[minigrid]", on Python 3.11 or newer'),
    "envpool": ("envpool", 'pip install "repertory[envpool]", on Python 3.11 or newer'),
    "pettingzoo": ("pettingzoo", 'pip install "repertory[pettingzoo]"'),
}


def missing(name: str) -> str | None:
    """How to install the package that the engine, back end or suite `name` lacks; None if it lacks none."""
    module, advice = _PACKAGES.get(name, ("framework", ""))
    return advice if importlib.util.find_spec(module) is None else None


def check_installed(engine: str, config: RunConfig) -> None:
    """Raises `CommandError` if the engine is unknown, or a package for it, replay or a logger is missing."""
    if engine not in ENGINES:
        hint = config_checks.nearest(engine, ENGINES)
        raise UsageError(f"Unknown engine {engine!r}; the engines are {', '.join(ENGINES)}.{hint}")
    if engine in ("serial", "threads") and config.num_learners > 1:
        raise UsageError(
            f"--num-learners {config.num_learners} requires one process per learner; --engine {engine} has "
            "one for all nodes. Use --engine processes."
        )
    loggers = [("--loggers", text.partition("(")[0]) for text in config.loggers]
    for flag, value in (("--engine", engine), ("--replay-backend", config.replay_backend), *loggers):
        advice = missing(value)
        if advice is not None:
            raise CommandError(f"{flag} {value} requires a package that is not installed: {advice}")


def environment_spec(agent: core.Agent, name: str, config: RunConfig) -> specs.EnvironmentSpec:
    """Returns the environment's spec as `agent` sees it.

    Raises:
      CommandError: The environment is unknown or cannot be created.
    """
    try:
        return make.environment_spec(agent, name, config)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--environment {name}: {error}") from error
    except ImportError as error:
        raise CommandError(f"--environment {name}: {error}") from error


def check_agent(agent: core.Agent, spec: specs.EnvironmentSpec) -> None:
    """Raises `UsageError` if the agent cannot act on zeros, or gives an action that does not fit the spec."""
    envs = 2
    try:
        policy = agent.make_policy(agent.make_networks(spec))
        zeros = [np.zeros((envs, *leaf.shape), leaf.dtype) for leaf in tree.flatten(spec.observations)]
        observation = tree.unflatten_as(spec.observations, zeros)
        action, _, _ = policy.step(observation, policy.initial_state(envs))
        for leaf, values in zip(tree.flatten(spec.actions), tree.flatten(action), strict=True):
            for env in range(envs):
                leaf.validate(values[env])
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise UsageError(f"{type(agent).__name__} cannot act in this environment: {error}") from error


def build_program(agent: core.Agent, environment: str | Callable[..., Any], config: RunConfig) -> Program:
    """Returns the program of a run without writing files; raises `CommandError` if it cannot be built."""
    try:
        program = make.make_program(agent, environment, config)
        make_options(program)  # Its errors, too, come before the first file.
        return program
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(f"This run cannot be built: {error}") from error
