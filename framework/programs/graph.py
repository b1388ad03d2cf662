"""The nodes of an agent's program, and their handles to each other."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import launch
from framework import core, specs
from framework.loggers import CSVLogger, Dispatcher, JSONLLogger, Logger, TensorBoardLogger
from framework.programs.actor_worker import ActorWorker
from framework.programs.counting import Counter
from framework.programs.evaluator import Evaluator
from framework.programs.inference_worker import InferenceWorker
from framework.programs.learner_group import LearnerReplica
from framework.programs.learner_worker import LearnerWorker
from framework.programs.monitor import Monitor
from framework.programs.run_checkpointer import RunCheckpointer, replay_checkpointer, saved_part
from framework.programs.run_config import RunConfig
from framework.programs.run_folder import RunFolder
from framework.programs.seeding import derive_seed

MakeEnvironment = Callable[[int, int], Any]  # (num_envs, seed) -> BatchedEnvironment

# For nodes whose methods may run twice: a call that a restart of the node interrupted is repeated, so that
# its caller does not fail.
_REPEAT = {"repeat_lost": True}
_REPLAY_MODULES = {"repertory": "framework.replay", "reverb": "framework.replay.dm_reverb"}


class Graph:
    """Adds nodes to `program`. Each node gets handles to nodes that were added before it.

    Args:
      program: the program that gets the nodes.
      agent: makes the parts in the nodes.
      make_environment: `(num_envs, seed) -> BatchedEnvironment`.
      spec: the `EnvironmentSpec` of one env.
      config: the run's settings, which every worker gets.
    """

    def __init__(
        self,
        program: launch.Program,
        agent: core.Agent,
        make_environment: MakeEnvironment,
        spec: specs.EnvironmentSpec,
        config: RunConfig,
    ):
        self.program = program
        self._agent, self._make_environment, self._spec, self._config = agent, make_environment, spec, config
        self._replay: Any = None
        self._services: dict[str, Any] = dict.fromkeys(("counter", "monitor", "checkpointer"))
        self._learner: Any = None
        self._inference: Any = None

    def add_replay(self) -> None:
        make_tables = functools.partial(_make_tables, self._agent, self._spec, self._seed_of("replay"))
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
        counter = self._services["counter"] = self._add("counter", _make_counter, self._config)
        self._services["monitor"] = self._add(
            "monitor",
            _make_monitor,
            run,
            logger_factory or functools.partial(make_logger, self._config),
            on_write,
            replay=self._replay,
            counter=counter,
        )
        if self._config.directory is not None:
            self._services["checkpointer"] = self._add(
                "checkpointer", RunCheckpointer, self._config, counter=counter, replay=self._replay
            )

    def add_learners(self) -> None:
        self._learner = self._add(
            "learner",
            LearnerWorker,
            self._agent,
            self._spec,
            self._config,
            replay=self._replay,
            seed=self._seed_of("learner"),
            **self._services,
        )
        for rank in range(1, self._config.num_learners):
            self._add(
                "learner",
                LearnerReplica,
                self._agent,
                self._spec,
                self._config,
                replay=self._replay,
                first=self._learner,
                rank=rank,
                seed=self._seed_of(f"learner-{rank}"),
                repeat=False,
            )

    def add_inference(self) -> None:
        self._inference = self._add(
            "inference",
            InferenceWorker,
            self._agent,
            self._spec,
            self._config,
            learner=self._learner,
            monitor=self._services["monitor"],
            checkpointer=self._services["checkpointer"],
            seed=self._seed_of("actor-0"),  # The same random choices as one actor with the policy.
            repeat=False,
        )

    def add_actors(self) -> None:
        for index in range(self._config.num_actors):
            self._add(
                "actor",
                ActorWorker,
                self._agent,
                self._make_environment,
                self._spec,
                self._config,
                replay=self._replay,
                learner=self._learner,
                index=index,
                seed=self._seed_of(f"actor-{index}"),
                inference=self._inference,
                repeat=False,
                **self._services,
            )

    def add_evaluator(self) -> None:
        self._add(
            "evaluator",
            Evaluator,
            self._agent,
            self._make_environment,
            self._spec,
            self._config,
            learner=self._learner,
            seed=self._seed_of("evaluator"),
            repeat=False,
            **self._services,
        )

    def _add(
        self, label: str, constructor: Callable[..., Any], *args: Any, repeat: bool = True, **kwargs: Any
    ) -> Any:
        if repeat:
            kwargs["courier_client_kwargs"] = _REPEAT
        return self.program.add_node(launch.CourierNode(constructor, *args, **kwargs), label=label)

    def _seed_of(self, name: str) -> int:
        return derive_seed(self._config.seed, name)


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


def _make_tables(agent: core.Agent, spec: specs.EnvironmentSpec, seed: int) -> list[Any]:
    tables = agent.make_tables(spec)
    for table in tables:
        if hasattr(table, "set_seed"):
            table.set_seed(derive_seed(seed, table.name))
    return tables


def _make_counter(config: RunConfig) -> Counter:
    counter = Counter(max_steps=config.max_env_steps)
    state = saved_part(config, "counter")
    if state is not None:
        counter.restore(state)
    return counter


def _make_monitor(
    run: RunFolder | None, logger_factory: Any, on_write: Any, *, replay: Any, counter: Any
) -> Monitor:
    if run is not None:
        run.record()
    return Monitor(logger_factory(), on_write=on_write, replay=replay, counter=counter)
