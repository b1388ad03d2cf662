"""The nodes of an agent's program, and what they hold of each other."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import launch
from framework import core
from framework.programs.actor_worker import ActorWorker
from framework.programs.evaluator import Evaluator
from framework.programs.inference_worker import InferenceWorker
from framework.programs.learner_group import LearnerReplica
from framework.programs.learner_worker import LearnerWorker
from framework.programs.monitor import Monitor
from framework.programs.run_checkpointer import RunCheckpointer
from framework.programs.seeding import derive_seed

# Of the nodes whose methods may be carried out twice: a call that a restart of the node swallowed is made
# again, so that nobody else fails because of it.
_REPEAT = {"repeat_lost": True}


class Graph:
    """Adds nodes to ``program``; each gets handles to those that were added before it.

    The order is that of ``make_program``. Options that are passed on are those of the worker in the node.

    Args:
      program: gets the nodes.
      agent: makes their parts.
      spec: the ``EnvironmentSpec`` of one env.
      seed: those of the nodes derive from it.
    """

    def __init__(self, program: launch.Program, agent: core.Agent, spec: Any, seed: int):
        self.program = program
        self._agent, self._spec, self._seed = agent, spec, seed
        self._replay: Any = None
        self._counter: Any = None
        self._monitor: Any = None
        self._checkpointer: Any = None
        self._learner: Any = None
        self._inference: Any = None

    def add_replay(self, directory: pathlib.Path | None, keep: int, backend: str) -> None:
        make_tables = functools.partial(_make_tables, self._agent, self._spec, self._seed_of("replay"))
        checkpointer_fn = None
        if directory is not None:
            checkpointer_fn = functools.partial(_replay_checkpointer, directory, keep)
        self._replay = self._add(
            "replay", launch.ReplayNode(make_tables, checkpointer_fn=checkpointer_fn, backend=backend)
        )

    def add_counter(self, max_env_steps: int | None, directory: pathlib.Path | None) -> None:
        self._counter = self._add(
            "counter",
            launch.CourierNode(_make_counter, max_env_steps, directory, courier_client_kwargs=_REPEAT),
        )

    def add_monitor(self, logger_factory: Any, on_write: Any, directory: pathlib.Path | None) -> None:
        if logger_factory is None and directory is not None:
            logger_factory = functools.partial(_make_logger, directory)
        self._monitor = self._add(
            "monitor",
            launch.CourierNode(
                _make_monitor,
                logger_factory,
                on_write,
                replay=self._replay,
                counter=self._counter,
                courier_client_kwargs=_REPEAT,
            ),
        )

    def add_checkpointer(self, directory: pathlib.Path, keep: int) -> None:
        self._checkpointer = self._add(
            "checkpointer",
            launch.CourierNode(
                RunCheckpointer,
                str(directory),
                keep,
                counter=self._counter,
                replay=self._replay,
                courier_client_kwargs=_REPEAT,
            ),
        )

    def add_learners(self, count: int, **options: Any) -> None:
        self._learner = self._add(
            "learner",
            launch.CourierNode(
                LearnerWorker,
                self._agent,
                self._spec,
                courier_client_kwargs=_REPEAT,
                replay=self._replay,
                counter=self._counter,
                monitor=self._monitor,
                checkpointer=self._checkpointer,
                seed=self._seed_of("learner"),
                num_learners=count,
                **options,
            ),
        )
        for rank in range(1, count):
            self._add(
                "learner",
                launch.CourierNode(
                    LearnerReplica,
                    self._agent,
                    self._spec,
                    replay=self._replay,
                    first=self._learner,
                    rank=rank,
                    num_learners=count,
                    seed=self._seed_of(f"learner-{rank}"),
                ),
            )

    def add_inference(self, envs: int, **options: Any) -> None:
        self._inference = self._add(
            "inference",
            launch.CourierNode(
                InferenceWorker,
                self._agent,
                self._spec,
                envs,
                learner=self._learner,
                monitor=self._monitor,
                checkpointer=self._checkpointer,
                seed=self._seed_of("actor-0"),  # the same choices as one actor that has the policy
                **options,
            ),
        )

    def add_actors(self, count: int, make_environment: Any, **options: Any) -> None:
        for index in range(count):
            self._add(
                "actor",
                launch.CourierNode(
                    ActorWorker,
                    self._agent,
                    make_environment,
                    self._spec,
                    replay=self._replay,
                    learner=self._learner,
                    counter=self._counter,
                    monitor=self._monitor,
                    checkpointer=self._checkpointer,
                    index=index,
                    seed=self._seed_of(f"actor-{index}"),
                    inference=self._inference,
                    **options,
                ),
            )

    def add_evaluator(self, make_environment: Any, **options: Any) -> None:
        self._add(
            "evaluator",
            launch.CourierNode(
                Evaluator,
                self._agent,
                make_environment,
                self._spec,
                learner=self._learner,
                counter=self._counter,
                monitor=self._monitor,
                checkpointer=self._checkpointer,
                seed=self._seed_of("evaluator"),
                **options,
            ),
        )

    def _add(self, group: str, node: Any) -> Any:
        return self.program.add_node(node, label=group)

    def _seed_of(self, name: str) -> int:
        return derive_seed(self._seed, name)


def _make_tables(agent: core.Agent, spec: Any, seed: int) -> list[Any]:
    tables = agent.make_tables(spec)
    for table in tables:
        if hasattr(table, "set_seed"):
            table.set_seed(derive_seed(seed, table.name))
    return tables


def _replay_checkpointer(directory: pathlib.Path, keep: int) -> Any:
    from framework.replay import checkpointers

    return checkpointers.DefaultCheckpointer(str(directory / "checkpoints" / "replay"), keep=keep)


def _make_counter(max_env_steps: int | None, directory: pathlib.Path | None) -> Any:
    from framework.counting import Counter
    from framework.programs.run_checkpointer import saved_part

    counter = Counter(max_steps=max_env_steps)
    state = saved_part(directory, "counter")
    if state is not None:
        counter.restore(state)
    return counter


def _make_logger(directory: pathlib.Path) -> Any:
    from framework.loggers import JSONLLogger

    return JSONLLogger(directory / "metrics.jsonl")


def _make_monitor(logger_factory: Any, on_write: Any, *, replay: Any, counter: Any) -> Monitor:
    logger = logger_factory() if logger_factory is not None else None
    return Monitor(logger, on_write=on_write, replay=replay, counter=counter)
