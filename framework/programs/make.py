"""Makes the program of an agent, and its environments."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

import launch
from framework import config_checks, core, environments, specs
from framework.datasets import read_episodes
from framework.datasets.episodes import plain_spec
from framework.environments import BatchedEnvironment
from framework.environments.single import takes
from framework.loggers import Logger
from framework.programs.graph import ProgramGraph
from framework.programs.greedy import live_policy
from framework.runs import initial
from framework.runs.callbacks import Callback, CallbackHost, OnWrite
from framework.runs.parts import check_packages, check_parts, wrappers_of
from framework.runs.run_config import RunConfig
from framework.runs.run_folder import RunFolder
from framework.workers.worker import Setup

_LOG = logging.getLogger(__name__)
# Options with which an episode ends at a lost life: of `atari:`, of EnvPool, and of gymnasium's wrapper.
_LIFE_OPTIONS = ("life_loss_terminates", "episodic_life", "terminal_on_life_loss")


def make_program(
    agent: core.Agent,
    environment_factory: str | Callable[..., Any] | None,
    config: RunConfig | None = None,
    *,
    logger_factory: Callable[[], Logger | None] | None = None,
    callbacks: Sequence[Callback] = (),
    on_write: Callable[[dict[str, Any]], None] | None = None,
    name: str | None = None,
    init: str | os.PathLike[str] | None = None,
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
      environment_factory: a name for `environments.make`, or a callable that returns an environment. With a
        `dataset` it is only for evaluations, and None makes none.
      config: the settings of the program. None is `RunConfig()`.
      logger_factory: returns the logger of all rows. None writes to the directory of `config`.
      callbacks: called at events of the run, in the launching process; see `Callback`. An exception of one
        ends the program, and `launch.launch` raises it.
      on_write: a callback as a function: called with the monitor's snapshot after every row.
      name: name of the program. None is the agent's class name.
      init: sets `config.init`, the run whose parameters a new run begins with.

    Raises:
      TypeError: An argument has another type, such as the agent's class in place of an instance.
      ValueError: The agent does not fit the environment or the config.
      ImportError: A package that the environment, replay or a logger needs is not installed.
      RunError: The directory holds a run of another agent or environment, or with other settings, except for
        its limits and devices (`run_folder.MAY_CHANGE`). Nothing has been written.
    """
    config_checks.instance("agent", agent, core.Agent, "such an object, as DQN(DQNConfig()) is")
    config = RunConfig() if config is None else config
    config_checks.instance("config", config, RunConfig, "such an object, as RunConfig(seed=1) is")
    if init is not None:
        config = dataclasses.replace(config, init=os.fspath(init))
    for each in callbacks:
        config_checks.instance("callbacks", each, Callback, "objects of classes that inherit it")
    if on_write is not None and not callable(on_write):
        raise TypeError(f"on_write: got {on_write!r}, expected a function of a snapshot, such as print.")
    check_parts(config)
    known = None if config.directory is None else RunFolder.find(config.directory)
    config = config.decided({} if known is None else vars(known.config))
    agent, lines = agent.decided(config, {} if known is None else known.agent_config)
    if config.dataset is not None:
        agent = agent.for_dataset(config.dataset)
    if environment_factory is None:
        config = dataclasses.replace(config, evaluate_period=None)
    spec = environment_spec(agent, environment_factory, config)
    for line in (*lines, *agent.describe_inputs(spec)):
        _LOG.info("%s", line)
    run = None
    if config.directory is not None:
        run = RunFolder.describe(agent, environment_factory, config, spec)
        run.check_same()
    make_envs = functools.partial(make_environment, agent, environment_factory, config)
    setup = Setup(agent.for_program(config.num_envs, config.num_learners), make_envs, spec, config)
    if config.init is not None and (run is None or run.checkpointer.latest() is None):
        initial.check_spec(config.init, spec)
        with torch.random.fork_rng(devices=()):  # The generator is the caller's.
            initial.load(config.init, setup.agent.make_networks(spec))
    callbacks = (*callbacks, *([] if on_write is None else [OnWrite(on_write)]))
    make_policy = functools.partial(live_policy, setup)
    host = CallbackHost(callbacks, make_policy) if callbacks else None
    graph = ProgramGraph(setup, run, logger_factory, host)
    setup.agent.build(graph)
    check_packages(config)  # After what the agent cannot use at all.
    program = graph.make_program(name or type(agent).__name__.lower())
    program.contexts = () if run is None else (run.continuing, run.begun)
    if host is not None:
        program.contexts += (host.hosted,)
        program.when_started = (host.attach,)
    return program


def environment_spec(
    agent: core.Agent, factory: str | Callable[..., Any] | None, config: RunConfig
) -> specs.EnvironmentSpec:
    """The spec of one env with the wrappers of `agent`, which is the dataset's where there is no environment.

    Makes the environment and closes it. Raises ValueError if the dataset is of another one.
    """
    episodes = None if config.dataset is None else read_episodes(config.dataset)
    if factory is None:
        if episodes is None:
            raise ValueError(
                "environment: got None, expected a name or a callable. Only a program with a dataset needs "
                "none."
            )
        return episodes.spec or plain_spec(episodes[0])
    environment = make_environment(agent, factory, config, 1, config.seed)
    try:
        spec = specs.make_environment_spec(environment)
    finally:
        environment.close()
    if episodes is not None:
        episodes.check(spec)
    return spec


def make_environment(
    agent: core.Agent,
    factory: str | Callable[..., Any] | None,
    config: RunConfig,
    num_envs: int,
    seed: int,
    render_mode: str | None = None,
    evaluation: bool = False,
) -> BatchedEnvironment:
    """Makes an environment of `num_envs` envs with the wrappers of `config`, and the agent's around them.

    An environment of an `evaluation` plays whole games, unless `config.evaluation_options` says otherwise,
    and its episode i begins with the seed `EVALUATION_SEED + seed + i`.
    """
    if factory is None:
        raise ValueError("environment: got None, because the run learned from a dataset without one.")
    options, stepping = dict(config.environment_options), config.stepping
    seeded: tuple[Any, ...] = ()
    if render_mode or (evaluation and stepping != "processes"):
        # CartPole's vector environment draws the first states of all envs from one generator.
        stepping = "inline"
    if evaluation:
        seed += environments.EVALUATION_SEED
        seeded = (functools.partial(environments.SeededEpisodes, first=seed),)
        for name in _LIFE_OPTIONS:
            if name in options or (callable(factory) and takes(factory, name)):
                options[name] = False
        options |= config.evaluation_options
    return environments.make(
        factory,
        num_envs=num_envs,
        seed=seed,
        stepping=stepping,
        render_mode=render_mode,
        reset_options=config.reset_options,
        info_metrics=config.info_metrics,
        options={**environments.options_in(config.directory, factory, evaluation), **options},
        wrappers=(*seeded, *wrappers_of(config), *agent.environment_wrappers()),
    )
