"""Builds a program from settings and checks all settings of a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tree

from framework import config_checks, core, specs
from framework.commands.options import CommandError, UsageError
from framework.devices import NoDeviceError
from framework.programs import make
from framework.runs import parts
from framework.runs.run_config import RunConfig
from launch import Program
from launch.engines.base import ENGINES
from launch.engines.options import make_options
from launch.errors import frames_of, hide_our_frames, message_of
from launch.texts import printable

NOT_BUILT = "This run cannot be built: "


def _check_installed(engine: str) -> None:
    """Raises `CommandError` if the engine is unknown, or needs a package that is missing."""
    if engine not in ENGINES:
        hint = config_checks.nearest(engine, ENGINES)
        raise UsageError(f"Unknown engine {engine!r}; the engines are {', '.join(ENGINES)}.{hint}")
    advice = parts.missing(engine)
    if advice is not None:
        raise CommandError(f"--engine {engine} requires a package that is not installed: {advice}")


def environment_spec(agent: core.Agent, name: str, config: RunConfig) -> specs.EnvironmentSpec:
    """Returns the environment's spec as `agent` sees it.

    Raises:
      CommandError: The environment is unknown or cannot be created.
    """
    try:
        return make.environment_spec(agent, name, config)
    except Exception as error:
        kind, text = CommandError, str(error)
        if isinstance(error, (ValueError, TypeError)):
            kind = UsageError
        elif not isinstance(error, (ImportError, OSError)):  # The environment's own code has raised it.
            hide_our_frames(error)
            print(printable(frames_of(error)), file=sys.stderr)
            text = f"{type(error).__name__}: {message_of(error)}"
        raise kind(f"--environment {name}: {text}") from error


def check_agent(agent: core.Agent, spec: specs.EnvironmentSpec) -> None:
    """Raises `UsageError` if the agent cannot act on zeros, or gives an action that does not fit the spec."""
    envs, failed = 2, f"{type(agent).__name__} cannot act in this environment: "
    with config_checks.RaisedAs(UsageError, (ValueError, TypeError, IndexError, RuntimeError), failed):
        policy = agent.make_policy(agent.make_networks(spec))
        observation = specs.zeros(spec.observations, (envs,))
        action, _, _ = policy.step(observation, policy.initial_state(envs))
        for leaf, values in zip(tree.flatten(spec.actions), tree.flatten(action), strict=True):
            for env in range(envs):
                leaf.validate(values[env])


def build_program(
    agent: core.Agent, environment: str | Callable[..., Any], config: RunConfig, engine: str
) -> Program:
    """Returns the program of a run without writing files.

    Raises:
      CommandError: It cannot be built, or would fail at its start on the engine.
    """
    _check_installed(engine)
    with (
        config_checks.RaisedAs(UsageError, (ValueError, TypeError), NOT_BUILT),
        config_checks.RaisedAs(CommandError, (ImportError, NoDeviceError), NOT_BUILT),
    ):
        program = make.make_program(agent, environment, config)
        options = make_options(program)
        for check in program.checks:
            check(engine, options)
        return program
