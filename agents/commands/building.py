"""From settings to a checked program: everything that can be wrong with a command line is found here."""

from __future__ import annotations

import functools
from typing import Any

from agents.commands.errors import CommandError
from agents.commands.options import TrainOptions
from framework.programs.run_config import RunConfig


def check_installed(options: TrainOptions, config: RunConfig) -> None:
    """CommandError if there is no such engine, or what it or the replay server needs is not there."""
    import importlib.util

    from launch.engines.base import engine_names

    name = options.engine
    if name not in engine_names():
        raise CommandError(f"Unknown engine {name!r}; the engines are {', '.join(engine_names())}.")
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise CommandError('--engine ray needs Ray: pip install "repertory[ray]"')
    if name in ("serial", "threads") and config.num_learners > 1:
        raise CommandError(
            f"--num-learners {config.num_learners} needs a process for each learner; --engine {name} has "
            "one for all nodes. Use --engine processes."
        )
    if config.replay_backend == "reverb" and importlib.util.find_spec("reverb") is None:
        raise CommandError(
            "--replay-backend reverb needs dm-reverb, on Python 3.11 or older: "
            'pip install "repertory[reverb]"'
        )


def environment_spec(name: str, seed: int, agent: Any) -> Any:
    """The spec of the environment as ``agent`` sees it; CommandError if it is unknown or cannot be made."""
    from framework import environments, specs

    try:
        environment = environments.make(name, num_envs=1, seed=seed, wrappers=agent.environment_wrappers())
        try:
            return specs.make_environment_spec(environment)
        finally:
            environment.close()
    except (ValueError, TypeError, ImportError) as error:
        raise CommandError(f"--environment {name}: {error}") from error


def check_agent(agent: Any, spec: Any) -> None:
    """Lets the agent act once on zeros; CommandError if it cannot, or if its action does not fit the spec."""
    import numpy as np
    import tree

    envs = 2
    try:
        policy = agent.make_policy(agent.make_networks(spec))
        observation = tree.map_structure(
            lambda leaf: np.zeros((envs, *leaf.shape), leaf.dtype), spec.observations
        )
        action, _, _ = policy.step(observation, policy.initial_state(envs))
    except (ValueError, TypeError, RuntimeError) as error:
        raise CommandError(f"{type(agent).__name__} cannot act in this environment: {error}") from error
    fits = functools.partial(_check_action, type(agent).__name__, envs)
    tree.map_structure_up_to(spec.actions, fits, spec.actions, action)


def build_program(agent: Any, environment: str, config: RunConfig) -> Any:
    """The program of a run. Nothing is written yet. CommandError if it cannot be made."""
    from framework import programs

    try:
        return programs.make_program(agent, environment, config)
    except (ValueError, TypeError, ImportError) as error:
        raise CommandError(f"This run cannot be built: {error}") from error


def _check_action(agent: str, envs: int, spec: Any, action: Any) -> None:
    shape, dtype = getattr(action, "shape", None), getattr(action, "dtype", None)
    wanted = (envs, *spec.shape)
    if shape != wanted or dtype != spec.dtype:
        raise CommandError(
            f"{agent} gives actions {spec.name!r} of shape {shape} and dtype {dtype} for {envs} envs; the "
            f"environment expects {wanted} and {spec.dtype}. Make the network's output fit the action spec."
        )
    for env in action:
        try:
            spec.validate(env)
        except ValueError as error:
            raise CommandError(f"{agent} gives an action that the environment forbids: {error}") from error
