"""Makes the program graph of an agent: the nodes, and their handles to each other."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import launch
from framework import core, environments, specs
from framework.environments import BatchedEnvironment
from framework.loggers import CSVLogger, Dispatcher, JSONLLogger, Logger, TensorBoardLogger
from framework.programs.actor_worker import ActorWorker
from framework.programs.evaluator import Evaluator
from framework.programs.inference_worker import InferenceWorker
from framework.programs.learner_group import LearnerReplica
from framework.programs.learner_worker import LearnerWorker
from framework.programs.run_config import RunConfig
from framework.programs.run_folder import RunFolder
from framework.programs.services import (
    Monitor,
    RunCheckpointer,
    make_counter,
    newest_checkpoint,
    replay_checkpointer,
)
from framework.programs.snapshot import Snapshot
from framework.programs.worker import Setup, derive_seed
from framework.replay import Table

_REPLAY_MODULES = {"repertory": "framework.replay", "reverb": "framework.replay.dm_reverb"}


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
        from it ends the program, and `launch.launch` raises it.
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
    setup = Setup(agent.for_program(config.num_envs, config.num_learners), make_envs, spec, config)
    learns = bool(setup.agent.make_tables(spec))

    program = launch.Program(name or type(agent).__name__.lower())
    if run is not None:
        program.snapshot = Snapshot(run, on_write, logger_factory)
    graph = Graph(program, setup)
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


class Graph:
    """Adds nodes to `program`. Each node gets handles to nodes that were added before it.

    Args:
      program: the program that gets the nodes.
      setup: what every worker is made from.
    """

    def __init__(self, program: launch.Program, setup: Setup):
        self.program = program
        self._setup, self._config = setup, setup.config
        self._replay: Any = None
        self._services: dict[str, Any] = dict.fromkeys(("counter", "monitor", "checkpointer"))
        self._learner: Any = None
        self._inference: Any = None

    def add_replay(self) -> None:
        make_tables = functools.partial(_make_tables, self._setup, self._seed_of("replay"))
        checkpointer_fn = None
        if self._config.directory is not None:
            checkpointer_fn = functools.partial(replay_checkpointer, self._config)
        backend = _REPLAY_MODULES[self._config.replay_backend]
        node = launch.ReplayNode(make_tables, checkpointer_fn=checkpointer_fn, backend=backend)
        self._replay = self.program.add_node(node, label="replay")

    def add_services(
        self,
        run: RunFolder | None,
        logger_factory: Callable[[], Logger | None] | None = None,
        on_write: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Adds the counter, the monitor (which records `run`) and, with a directory, the checkpointer."""
        services, make_rows = self._services, logger_factory or functools.partial(make_logger, self._config)
        services["counter"] = self._add("counter", make_counter, self._config)
        services["monitor"] = self._add(
            "monitor", _make_monitor, run, make_rows, on_write, counter=services["counter"]
        )
        if self._config.directory is not None:
            services["checkpointer"] = self._add(
                "checkpointer",
                RunCheckpointer,
                self._config,
                counter=services["counter"],
                replay=self._replay,
            )

    def add_learners(self) -> None:
        seed = self._seed_of("learner")
        self._learner = self._add(
            "learner", LearnerWorker, self._setup, replay=self._replay, seed=seed, **self._services
        )
        common = {"replay": self._replay, "first": self._learner}
        for rank in range(1, self._config.num_learners):
            seed = self._seed_of(f"learner-{rank}")
            self._add("learner", LearnerReplica, self._setup, rank=rank, seed=seed, **common)

    def add_inference(self) -> None:
        self._inference = self._add(
            "inference",
            InferenceWorker,
            self._setup,
            learner=self._learner,
            monitor=self._services["monitor"],
            checkpointer=self._services["checkpointer"],
            seed=self._seed_of("actor-0"),  # The same random choices as one actor with the policy.
            repeat=False,
        )

    def add_actors(self) -> None:
        sources = {"replay": self._replay, "learner": self._learner, "inference": self._inference}
        for index in range(self._config.num_actors):
            seed = self._seed_of(f"actor-{index}")
            self._add("actor", ActorWorker, self._setup, index=index, seed=seed, **sources, **self._services)

    def add_evaluator(self) -> None:
        own = {"learner": self._learner, "seed": self._seed_of("evaluator")}
        self._add("evaluator", Evaluator, self._setup, **own, **self._services)

    def _add(
        self, label: str, constructor: Callable[..., Any], *args: Any, repeat: bool = True, **kwargs: Any
    ) -> Any:
        """Adds a node.

        With `repeat`, its methods may run twice: a call that a restart of the node interrupted is repeated,
        so that its caller does not fail.
        """
        kwargs["courier_client_kwargs"] = {"repeat_lost": repeat}
        return self.program.add_node(launch.CourierNode(constructor, *args, **kwargs), label=label)

    def _seed_of(self, name: str) -> int:
        return derive_seed(self._config.seed, name)


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
) -> BatchedEnvironment:
    """Makes an environment of `num_envs` envs with the agent's wrappers."""
    return environments.make(
        factory,
        num_envs=num_envs,
        seed=seed,
        stepping="inline" if render_mode else config.stepping,
        render_mode=render_mode,
        wrappers=agent.environment_wrappers(),
    )


def make_logger(config: RunConfig) -> Logger | None:
    """The logger that writes a run's rows to its directory; None without a directory."""
    if config.directory is None:
        return None
    made: list[Logger] = [JSONLLogger(os.path.join(config.directory, "metrics.jsonl"))]
    if config.csv:
        made.append(CSVLogger(os.path.join(config.directory, "metrics.csv")))
    if config.tensorboard:
        made.append(TensorBoardLogger(os.path.join(config.directory, "tensorboard")))
    return Dispatcher(made)


def _make_tables(setup: Setup, seed: int) -> list[Table]:
    tables = setup.agent.make_tables(setup.spec)
    for table in tables:
        table.set_seed(derive_seed(seed, table.name))
    return tables


def _make_monitor(run: RunFolder | None, logger_factory: Any, on_write: Any, *, counter: Any) -> Monitor:
    resumed = False
    if run is not None:
        run.record()
        resumed = newest_checkpoint(run.config) is not None
    return Monitor(logger_factory(), on_write=on_write, counter=counter, resumed=resumed)
