"""`train`: a run as one call, which does what `repertory train` does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from framework import core
from framework.config_checks import whole_number
from framework.experiments import running
from framework.experiments.run import Run
from framework.experiments.settings import settings_of
from framework.programs import make
from framework.runs.callbacks import Callback
from framework.runs.registry import describe_agent
from framework.runs.run_config import RunConfig
from framework.runs.run_folder import RunFolder


def train(
    agent: str | Callable[..., core.Agent] | core.Agent,
    environment: str | Callable[..., Any] | None,
    *,
    engine: str = "processes",
    directory: str | os.PathLike[str] | None = None,
    seed: int = 1,
    run: RunConfig | Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Trains an agent and returns its run. It starts from the preset, as `repertory train` does.

    ```python
    run = framework.train("ppo", "gymnasium:CartPole-v1", max_env_steps=20_000, learning_rate=3e-4)
    action = run.policy()(observations)
    ```

    A `directory` that holds a run continues it, with the same settings and perhaps other limits.

    Args:
      agent: its name, its class, or a function that makes it: its settings are the preset's. Or an agent,
        which keeps its own settings; the preset then says how the run is made.
      environment: see `environments.make`. None for a run that learns from a `dataset` without evaluations.
      engine: `processes`, `threads`, `serial`, `ray` or `launchpad`.
      directory: the folder of the run. None makes one in `runs/`.
      seed: the seed of all random numbers. The one in `run` holds if this is left at 1.
      run: a `RunConfig` to start from, in place of the preset's; or a mapping of fields, which change it.
      callbacks: see `Callback`.
      progress: whether to show how far the run is.
      settings: fields of `RunConfig` and of the agent's config. A name that both have is `RunConfig`'s: give
        an agent with its config to set the other.

    Raises:
      ValueError: A setting is unknown, or does not fit. The text names the nearest.
      TypeError: An argument has another type.
      ImportError: A package is not installed.
      RunError: The directory holds a run with other settings, or one that has reached its limits.
      NodeError: A node failed.
      ProgramInterrupted: Ctrl-C or a signal stopped the run cleanly. The same call continues it if it names
        the directory.
    """
    own = dict(run) if isinstance(run, Mapping) else {} if run is None else vars(run)
    in_run = own.get("seed") or 1
    seed = whole_number("seed", in_run if seed == 1 else seed, 0)
    place = {} if directory is None else {"directory": os.fspath(directory)}
    made, config, line = settings_of(agent, environment, run, {**settings, "seed": seed, **place})
    if config.directory is not None:
        known = RunFolder.find(str(config.directory))
        if known is not None and "evaluate_period" not in {**own, **settings}:
            # It follows from the limit with which the run began.
            config = dataclasses.replace(config, evaluate_period=known.config.evaluate_period)
        return _train(made, environment, config, engine, callbacks, line, progress)
    path = running.new_folder(describe_agent(made)[0], _name_of(environment), config.seed)
    with running.removed_if_empty(path):
        config = dataclasses.replace(config, directory=str(path))
        return _train(made, environment, config, engine, callbacks, line, progress)


def _train(
    agent: core.Agent,
    environment: str | Callable[..., Any] | None,
    config: RunConfig,
    engine: str,
    callbacks: Sequence[Callback],
    line: str,
    progress: bool,
) -> Run:
    known = RunFolder.find(str(config.directory))
    config = config.decided({} if known is None else vars(known.config))
    agent, lines = agent.decided(config, {} if known is None else known.agent_config)
    program = make.make_program(agent, environment, config, callbacks=callbacks)
    spec = make.environment_spec(agent, environment, config)
    folder = RunFolder.describe(agent, environment, config, spec)
    folder = dataclasses.replace(folder, engine=engine)
    told = (*filter(None, [line]), *lines, *agent.describe_inputs(spec))
    running.begin(folder, program, told, progress)
    return Run(folder.path, folder.modules)


def _name_of(environment: str | Callable[..., Any] | None) -> str:
    if environment is None:
        return "dataset"
    if isinstance(environment, str):
        return environment
    return str(getattr(environment, "__name__", type(environment).__name__))
