"""Builds a program from settings and checks all settings of a command line."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import tree

from framework import core, specs
from framework.commands.options import CommandError, UsageError
from framework.programs import make
from framework.programs.run_config import RunConfig
from launch import Program
from launch.engines.base import engine_names


def check_installed(engine: str, config: RunConfig) -> None:
    """Raises `CommandError` if the engine is unknown, or a package for it or its replay is missing."""
    if engine not in engine_names():
        raise UsageError(f"Unknown engine {engine!r}; the engines are {', '.join(engine_names())}.")
    if engine in ("serial", "threads") and config.num_learners > 1:
        raise UsageError(
            f"--num-learners {config.num_learners} requires one process per learner; --engine {engine} has "
            "one for all nodes. Use --engine processes."
        )
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise CommandError('--engine ray requires Ray: pip install "repertory[ray]"')
    if config.replay_backend == "reverb" and importlib.util.find_spec("reverb") is None:
        raise CommandError(
            "--replay-backend reverb requires dm-reverb, on Python 3.11 or older: "
            'pip install "repertory[reverb]"'
        )


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
    """Makes the agent act once on zeros.

    Raises:
      CommandError: The agent fails, or its action does not fit the spec.
    """
    envs = 2
    try:
        policy = agent.make_policy(agent.make_networks(spec))
        observation = tree.map_structure(
            lambda leaf: np.zeros((envs, *leaf.shape), leaf.dtype), spec.observations
        )
        action, _, _ = policy.step(observation, policy.initial_state(envs))
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{type(agent).__name__} cannot act in this environment: {error}") from error
    fits = functools.partial(_check_action, type(agent).__name__, envs)
    tree.map_structure_up_to(spec.actions, fits, spec.actions, action)


def build_program(agent: core.Agent, environment: str | Callable[..., Any], config: RunConfig) -> Program:
    """Returns the program of a run without writing files; raises `CommandError` if it cannot be built."""
    try:
        return make.make_program(agent, environment, config)
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(f"This run cannot be built: {error}") from error


def _check_action(agent: str, envs: int, spec: Any, action: Any) -> None:
    shape, dtype = getattr(action, "shape", None), getattr(action, "dtype", None)
    wanted = (envs, *spec.shape)
    if shape != wanted or dtype != spec.dtype:
        raise CommandError(
            f"{agent}: got actions {spec.name!r} of shape {shape} and dtype {dtype} for {envs} envs, "
            f"expected {wanted} and {spec.dtype}. Make the network's output fit the action spec."
        )
    for env in action:
        try:
            spec.validate(env)
        except ValueError as error:
            raise CommandError(f"{agent} gives an action that the environment forbids: {error}") from error
