"""Makes the program graph of an agent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import launch
from framework import core, environments, specs
from framework.loggers import Logger
from framework.programs.graph import Graph
from framework.programs.run_config import RunConfig
from framework.programs.run_folder import RunFolder


def make_program(
    agent: core.Agent,
    environment_factory: str | Callable[..., Any],
    config: RunConfig | None = None,
    *,
    logger_factory: Callable[[], Logger | None] | None = None,
    on_write: Callable[[dict[str, Any]], None] | None = None,
    name: str | None = None,
) -> launch.Program:
    """Makes the program graph of `agent`, which runs on any engine:

    ```python
    program = make_program(DQN(DQNConfig()), "gymnasium:CartPole-v1", RunConfig(max_env_steps=50_000))
    result = launch.launch(program, engine="serial")
    ```

    Nodes: `replay`, `counter`, `monitor`, `checkpointer` (with a `directory`), `learner`,
    `inference` (if it is a server), `actor` (`num_actors` of them) and `evaluator`. This function makes
    the environment once to read its specs. Each node that steps an environment makes its own.

    Args:
      agent: makes the parts. An agent without tables runs without replay and learner.
      environment_factory: a name for `environments.make`, or a callable that returns an environment.
      config: the settings of the program. None is `RunConfig()`.
      logger_factory: returns the logger of all rows. None writes to the directory of `config`.
      on_write: called with the monitor's snapshot after every row, in the monitor's process. An exception
        from it ends the program and is the `__cause__` of the `launch.NodeError`.
      name: name of the program. None is the agent's class name.

    Raises:
      ValueError: The agent does not fit the environment or the config.
      RunError: The directory holds a run of another agent or environment.
    """
    config = config or RunConfig()
    spec = environment_spec(agent, environment_factory, config)
    run = None
    if config.directory is not None:
        run = RunFolder.describe(agent, environment_factory, config, spec)
        run.check_same()
    make_envs = functools.partial(make_environment, agent, environment_factory, config)
    agent = agent.for_program(config.num_envs, config.num_learners)
    learns = bool(agent.make_tables(spec))

    program = launch.Program(name or type(agent).__name__.lower())
    graph = Graph(program, agent, make_envs, spec, config)
    if learns:
        graph.add_replay()
    graph.add_services(run, logger_factory, on_write)
    if learns:
        graph.add_learners()
    if config.inference.endswith("server"):
        graph.add_inference()
    graph.add_actors()
    if config.evaluate_period is not None:
        graph.add_evaluator()
    return program


def environment_spec(
    agent: core.Agent, factory: str | Callable[..., Any], config: RunConfig
) -> specs.EnvironmentSpec:
    """The spec of one env with the wrappers of `agent`. Makes the environment and closes it."""
    environment = make_environment(agent, factory, config, 1, config.seed)
    try:
        return specs.make_environment_spec(environment)
    finally:
        environment.close()


def make_environment(
    agent: core.Agent,
    factory: str | Callable[..., Any],
    config: RunConfig,
    num_envs: int,
    seed: int,
    render_mode: str | None = None,
) -> Any:
    """Makes an environment of `num_envs` envs with the agent's wrappers."""
    return environments.make(
        factory,
        num_envs=num_envs,
        seed=seed,
        stepping="inline" if render_mode else config.stepping,
        render_mode=render_mode,
        wrappers=agent.environment_wrappers(),
    )
