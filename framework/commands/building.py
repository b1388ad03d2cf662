"""Builds a program from settings and checks all settings of a command line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import tree
from torch import nn

from framework import config_checks, core, specs
from framework.commands.options import CommandError, UsageError
from framework.devices import NoDeviceError
from framework.learners.device_map import resolved
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


def environment_spec(agent: core.Agent, name: str | None, config: RunConfig) -> specs.EnvironmentSpec:
    """Returns the environment's spec as `agent` sees it.

    Raises:
      CommandError: The environment is unknown or cannot be created.
    """
    try:
        return make.environment_spec(agent, name, config)
    except (ValueError, TypeError) as error:  # It may be an option that it does not take.
        raise UsageError(f"--environment {name}: {error}") from error
    except Exception as error:
        raise _told(f"--environment {name}: ", error) from error


def _told(before: str, error: Exception) -> CommandError:
    """The error that ends the command; prints where code of an environment or of an agent raised a fault."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals.get("__name__", "").partition(".")[0] in ("agents", "framework", "launch")
    if is_ours and isinstance(error, (ValueError, TypeError)):
        return UsageError(f"{before}{error}")
    if isinstance(error, (ImportError, OSError)):
        return CommandError(f"{before}{error}")
    hide_our_frames(error)
    print(printable(frames_of(error)), file=sys.stderr)
    return CommandError(f"{before}{type(error).__name__}: {message_of(error)}")


def check_agent(agent: core.Agent, spec: specs.EnvironmentSpec) -> None:
    """Raises `CommandError` if the agent cannot act on zeros, or its action does not fit the spec."""
    envs = 2
    try:
        networks = agent.make_networks(spec)
        if isinstance(networks, nn.Module):
            resolved(networks, getattr(getattr(agent, "config", None), "devices", {}))
        policy = agent.make_policy(networks)
        observation = specs.zeros(spec.observations, (envs,))
        action, _, _ = policy.step(observation, policy.initial_state(envs))
        for leaf, values in zip(tree.flatten(spec.actions), tree.flatten(action), strict=True):
            for env in range(envs):
                leaf.validate(values[env])
    except Exception as error:
        raise _told(f"{type(agent).__name__} cannot act in this environment: ", error) from error


def build_program(
    agent: core.Agent, environment: str | Callable[..., Any] | None, config: RunConfig, engine: str
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
