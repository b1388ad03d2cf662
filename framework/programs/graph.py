"""The nodes of a program, and their handles to each other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import launch
from framework import config_checks, core, flow
from framework.clock import Clock
from framework.config_checks import refuse
from framework.devices import DeviceCheck
from framework.loggers import Logger
from framework.plans.plan_worker import LearnerParts, PlanWorker
from framework.plans.rollout_worker import RolloutWorker
from framework.programs.groups import LearnerHandle, connect_one, connect_shards, member, nearest
from framework.programs.snapshot import Snapshot
from framework.replay.node import ReplayNode
from framework.runs import checkpoints
from framework.runs.callbacks import CallbackHost, Mailbox
from framework.runs.checkpoints import RunCheckpointer, replay_checkpointer
from framework.runs.parts import make_logger
from framework.runs.run_folder import RunFolder
from framework.runs.services import Monitor
from framework.workers.actor_worker import ActorWorker
from framework.workers.evaluator import Evaluator
from framework.workers.inference_worker import InferenceWorker
from framework.workers.learner_worker import LearnerReplica, LearnerWorker
from framework.workers.variable_source import VariableSource
from framework.workers.worker import Setup, derive_seed, make_tables

_REPLAY_MODULES = {"repertory": "framework.replay", "reverb": "framework.replay.dm_reverb"}
# Seconds that a program waits at its end for the step of a learner, and for the last checkpoint.
_STEP_S, _SAVE_S = 60.0, 600.0
# Names of services and of parts of a checkpoint; the steps of a learner "env" would count as env steps.
_RESERVED = ("counter", "monitor", "checkpointer", "best", "program", "callbacks", "env")


class ProgramGraph(core.Graph):
    """The `Graph` of `make_program`.

    Args:
      setup: what every worker is made from.
      run: the folder of the run, if it has one.
      logger_factory: see `make_program`.
      callbacks: see `make_program`.

    Attributes:
      config: the settings of the program.
      spec: the `EnvironmentSpec` of one env.
      clock: what the program counts.
    """

    def __init__(
        self,
        setup: Setup,
        run: RunFolder | None = None,
        logger_factory: Callable[[], Logger | None] | None = None,
        callbacks: CallbackHost | None = None,
    ):
        self.config, self.spec = setup.config, setup.spec
        self._setup, self._snapshot = setup, None if run is None else Snapshot(run, callbacks, logger_factory)
        self._names = {*_RESERVED}
        self._devices: list[tuple[str, str, str]] = []  # Group, name of the setting, device.
        self._min_nodes: dict[str, int] = {}
        # By a variable source that may be lost, the learner, from which evaluators take the parameters.
        self._of_evaluators: dict[launch.Handle | None, launch.Handle] = {}
        self.clock, self._may_act = setup.clock, False
        self._replays: list[tuple[str, str, launch.ProgramNode]] = []  # With the part of a checkpoint.
        self._services: list[tuple[str, launch.ProgramNode]] = []
        self._workers: list[tuple[str, launch.ProgramNode]] = []
        self._strategies: dict[str, str] = {}
        # The learner's name and agent, by its variable source.
        self._learners: dict[launch.Handle | None, tuple[str, core.Agent | None]] = {}
        self.counter = self._add(self._services, "counter", checkpoints.make_counter, self.config)
        make_rows = logger_factory or functools.partial(make_logger, self.config)
        self.monitor = self._add(
            *(self._services, "monitor", _make_monitor, run, make_rows, callbacks),
            counter=self.counter,
            clock=self.clock,
            # While every actor waits for a callback, there is room for its events.
            courier_kwargs={"thread_pool_size": 128 + 2 * self.config.num_actors},
        )
        self.checkpointer = None
        if run is not None:
            self.checkpointer = self._add(self._services, "checkpointer", RunCheckpointer, self.config)

    def add_replay(
        self, shards: int | None = None, *, agent: core.Agent | None = None, name: str = "replay"
    ) -> launch.Handle | None:
        setup = self._setup_of(agent)
        self._claim(name)
        if not setup.agent.make_tables(self.spec):
            return None
        shards = shards or self.config.replay_shards
        if shards > 1 and setup.agent.max_policy_lag is not None:
            raise ValueError(
                f"replay_shards: got {shards}, expected 1: {type(setup.agent).__name__} learns from one "
                "unroll of every env at a time, and all of them are in one table."
            )
        backend = _REPLAY_MODULES[self.config.replay_backend]
        handles = []
        for index, part in enumerate(checkpoints.replay_parts(name, shards)):
            tables_fn = functools.partial(make_tables, setup, self._seed_of(part), shards)
            checkpointer_fn = None
            if self.config.directory is not None:
                checkpointer_fn = functools.partial(replay_checkpointer, self.config, name, index, shards)
            node = ReplayNode(tables_fn, checkpointer_fn=checkpointer_fn, backend=backend)
            self._replays.append((name, part, node))
            handles.append(node.create_handle())
        if shards == 1:
            return handles[0]
        return launch.HandleGroup(handles, functools.partial(connect_shards, self._seed_of(name)))

    def add_learner(
        self,
        replay: launch.Handle | None,
        *,
        agent: core.Agent | None = None,
        name: str = "learner",
        clients: Mapping[str, launch.Handle] | None = None,
    ) -> launch.Handle | None:
        self._claim(name)
        if replay is None:
            return None
        self._uses_device(name, agent)
        data = {"replay": replay, "clients": dict(clients or {})}
        learner = self._add_worker(name, LearnerWorker, agent, name=name, **data, **self._handles)
        self._learners[learner] = name, agent
        if self.config.num_learners > 1:
            self._strategies[name] = "PACK"  # Gradients travel between them at each step.
        for rank in range(1, self.config.num_learners):
            seed = self._seed_of(f"{name}-{rank}")
            self._add_worker(name, LearnerReplica, agent, rank=rank, seed=seed, first=learner, **data)
        return learner

    def add_variable_source(self, learner: launch.Handle | None) -> launch.Handle | None:
        if learner is None or not self.config.variable_sources:
            return learner
        handles = [
            self._add_worker("variable_source", VariableSource, self._learner_of(learner)[1], learner=learner)
            for _ in range(self.config.variable_sources)
        ]
        self._strategies["variable_source"] = "SPREAD"
        sources = handles[0] if len(handles) == 1 else launch.HandleGroup(handles, connect_one)
        self._learners[sources] = self._learner_of(learner)
        if self.config.min_actors is not None:  # They are lost with the machines of actors.
            self._min_nodes["variable_source"] = 1
            self._of_evaluators[sources] = learner
        return sources

    def add_inference(
        self, variables: launch.Handle | None, *, agent: core.Agent | None = None, name: str = "inference"
    ) -> launch.Handle | None:
        self._claim(name)
        if not self.config.inference.endswith("server"):
            return None
        self._devices.append((name, "inference_device", self.config.inference_device))
        count, handles = self.config.inference_nodes, []
        for index in range(count):
            own = name if count == 1 else f"{name}-{index}"
            node = self._add_worker(
                name,
                InferenceWorker,
                agent or self._learner_of(variables)[1],
                learner=nearest(variables, index),
                monitor=self.monitor,
                checkpointer=self.checkpointer,
                name=own,
                # The same random choices as one actor with the policy.
                seed=self._seed_of(f"actor-{index}" if name == "inference" else own),
                repeat=False,
            )
            handles.append(node)
        return handles[0] if count == 1 else launch.HandleGroup(handles, connect_one)

    def add_actors(
        self,
        replay: launch.Handle | None,
        variables: launch.Handle | None,
        *,
        agent: core.Agent | None = None,
        name: str = "actor",
    ) -> None:
        self._claim(name)
        self._may_act = True
        learner_name, own = self._learner_of(variables)
        agent, config = agent or own, self.config
        if config.min_actors is not None:
            acts = self._setup_of(agent).agent
            if acts.max_policy_lag is not None:
                why = f"a batch of {type(acts).__name__} waits for every actor. Lost ones are restarted."
                refuse(config, "min_actors", f", expected None: {why}")
            self._min_nodes[name] = config.min_actors
        inference = self.add_inference(
            variables, agent=agent, name="inference" if name == "actor" else f"{name}.inference"
        )
        self._strategies[name] = "SPREAD"
        for index in range(self.config.num_actors):
            self._add_worker(
                name,
                ActorWorker,
                agent,
                name=name,
                index=index,
                seed=self._seed_of(f"{name}-{index}"),
                replay=member(replay, index),
                learner=nearest(variables, index),
                inference=member(inference, index),
                steps_name=f"{learner_name}_steps",
                **self._handles,
            )

    def add_plan(
        self,
        replay: Any = None,
        *,
        agent: core.Agent | None = None,
        learners: Mapping[str, core.Agent] | None = None,
    ) -> Any:
        setup = self._setup_of(agent)
        if type(setup.agent).plan is core.Agent.plan:
            raise TypeError(f"add_plan: got {type(setup.agent).__name__}, expected an agent with a plan.")
        expected = {
            "num_learners": 1,
            "inference": "local",
            "variable_sources": 0,
            "min_actors": None,
            **({} if replay else {"replay_shards": 1, "replay_backend": "repertory"}),
        }
        for field, value in expected.items():
            if getattr(self.config, field) != value:
                refuse(self.config, field, f", expected {value!r} for {type(setup.agent).__name__}.")
        names = list(learners or ("learner",))
        if self.config.num_actors % len(names):
            why = f", expected a multiple of {len(names)}, the number of learners of the plan."
            refuse(self.config, "num_actors", why)
        for name in dict.fromkeys(("learner", "actor", *names)):  # The node is called learner.
            self._claim(name)
        self._may_act = True
        node = launch.CourierNode(PlanWorker, courier_client_kwargs={"repeat_lost": True})
        self._workers.append(("learner", node))
        learner, parts = node.create_handle(), {}
        handles = {name: LearnerHandle(learner, name) if learners else learner for name in names}
        for name, handle in handles.items():
            own = learners[name] if learners else agent
            self._learners[handle] = name, own
            self._uses_device("learner", own)
            data = replay[name] if isinstance(replay, Mapping) else replay
            parts[name] = LearnerParts(self._setup_of(own, len(names)), self._seed_of(name), data)
        self._strategies["actor"] = "SPREAD"
        workers = []
        for index in range(self.config.num_actors):
            name = names[index % len(names)]
            of_worker, _, data = parts[name]
            if data is None:
                own = of_worker.agent.for_worker(self.config.envs_per_actor)
                of_worker = dataclasses.replace(of_worker, agent=own)
            worker = flow.worker_node(
                setup.agent.worker_class or RolloutWorker,
                of_worker,
                index=index,
                steps_name=f"{name}_steps",
                seed=self._seed_of(f"actor-{index}"),
                replay=member(data, index // len(names)),
                learner=handles[name],
                **self._handles,
            )
            self._workers.append(("actor", worker))
            workers.append(worker.create_handle())
        _, seed, data = parts[names[0]]
        more = {"learners": parts} if learners else {"replay": data, "seed": seed}
        node.configure(setup, workers=workers, **more, **self._handles)
        return handles if learners else learner

    def add_evaluator(
        self,
        variables: launch.Handle | None,
        *,
        agent: core.Agent | None = None,
        name: str = "evaluator",
    ) -> None:
        self._claim(name)
        if self.config.evaluate_period is None:
            return
        self._setup.evaluators.append(name)
        learner_name, own = self._learner_of(variables)
        setup, make = self._setup_of(agent or own), self._setup.make_environment
        if isinstance(make, functools.partial):  # `make.make_environment` made it.
            setup = dataclasses.replace(setup, make_environment=functools.partial(make, evaluation=True))
        source = self._of_evaluators.get(variables, variables)
        steps = f"{learner_name}_steps"
        data: dict[str, Any] = {"learner": source, "name": name, "steps_name": steps, **self._handles}
        self._add(self._workers, name, Evaluator, setup, seed=self._seed_of(name), **data)

    def add_node(self, name: str, node: launch.ProgramNode) -> launch.Handle:
        if name in self._names:
            raise ValueError(f"name: got {name!r}, which the graph uses or reserves. Give another name.")
        self._workers.append((name, node))
        self._may_act = True
        return node.create_handle()

    def make_program(self, name: str) -> launch.Program:
        """The program. Its nodes close in the opposite order: workers, the checkpointer, replay."""
        program = launch.Program(name)
        program.snapshot, program.seed = self._snapshot, self.config.seed
        program.preload = ["torch", "framework.programs.make", *self._setup.agent.preload]
        program.resources, program.strategies = self.config.resources, self._strategies
        program.min_nodes, program.min_nodes_timeout = self._min_nodes, self.config.min_actors_timeout
        replays = [(label, node) for label, _, node in self._replays]
        learners = {learner for learner, _ in self._learners.values()}
        if learners and not self._may_act:
            self.clock.count = f"{min(learners, key=lambda name: name != 'learner')}_steps"
        for label, node in (*replays, *self._services, *self._workers):
            if label == "checkpointer":
                node.configure(
                    self.config,
                    counter=self.counter,
                    clock=self.clock,
                    monitor=self.monitor,
                    replays={part: replay.create_handle() for _, part, replay in self._replays},
                    learners=sorted(learners),
                )
            program.add_node(node, label=label)
        if self._snapshot is not None:
            self._snapshot.num_nodes = {group: len(nodes) for group, nodes in program.groups.items()}
        times = {**dict.fromkeys({*learners, "learner"}, _STEP_S), "checkpointer": _SAVE_S}
        program.stop_timeouts = {group: times[group] for group in program.groups if group in times}
        program.checks = (self._check_engine, DeviceCheck(self._devices))
        config_checks.names("resources", self.config.resources, list(program.groups))
        return program

    @property
    def _handles(self) -> dict[str, launch.Handle | None]:
        return {"counter": self.counter, "monitor": self.monitor, "checkpointer": self.checkpointer}

    def _check_engine(self, engine: str, options: Any) -> None:
        if engine in ("serial", "threads") and self.config.num_learners > 1:
            which = f" on engine {engine!r}, which has one process for all nodes"
            refuse(self.config, "num_learners", f"{which}, expected 1. Use engine 'processes'.")

    def _uses_device(self, group: str, agent: core.Agent | None) -> None:
        own = self._setup_of(agent).agent
        device = getattr(own, "device", getattr(getattr(own, "config", None), "device", "cpu"))
        self._devices.append((group, "device", str(device)))
        devices = config_checks.flat_names(getattr(getattr(own, "config", None), "devices", {}))
        self._devices += [(group, f"devices.{part}", each) for part, each in devices.items()]

    def _learner_of(self, variables: launch.Handle | None) -> tuple[str, core.Agent | None]:
        """The learner whose parameters `variables` serves: its name, and its agent. None is the program's."""
        return self._learners.get(variables, ("learner", None))

    def _setup_of(self, agent: core.Agent | None, shares: int = 1) -> Setup:
        """The setup of `agent`, which gets one of several equal shares of the envs."""
        if agent is None:
            return self._setup
        agent = agent.for_program(self.config.num_envs // shares, self.config.num_learners)
        return dataclasses.replace(self._setup, agent=agent)

    def _claim(self, name: str) -> None:
        """Checks that `name` is new: it is the name of a group, of rows and of parts of a checkpoint."""
        if name in self._names or any(name == label for label, _ in self._workers):
            raise ValueError(f"name: got {name!r}, which the graph uses or reserves. Give another name.")
        self._names.add(name)

    def _add_worker(
        self, label: str, constructor: Callable[..., Any], agent: core.Agent | None = None, **kwargs: Any
    ) -> launch.Handle:
        kwargs.setdefault("seed", self._seed_of(label))
        return self._add(self._workers, label, constructor, self._setup_of(agent), **kwargs)

    def _add(
        self,
        nodes: list[tuple[str, launch.ProgramNode]],
        label: str,
        constructor: Callable[..., Any],
        *args: Any,
        repeat: bool = True,
        **kwargs: Any,
    ) -> launch.Handle:
        """Adds a node.

        With `repeat`, its methods may run twice: a call that a restart of the node interrupted is repeated,
        so that its caller does not fail.
        """
        kwargs["courier_client_kwargs"] = {"repeat_lost": repeat}
        nodes.append((label, launch.CourierNode(constructor, *args, **kwargs)))
        return nodes[-1][1].create_handle()

    def _seed_of(self, name: str) -> int:
        return derive_seed(self.config.seed, name)


def _make_monitor(
    run: RunFolder | None,
    logger_factory: Any,
    callbacks: CallbackHost | Mailbox | None,
    *,
    counter: Any,
    clock: Clock,
) -> Monitor:
    reader = None if run is None else checkpoints.newest_checkpoint(run.config)
    if run is not None:
        run.record()
    resumed_at = None
    if reader is not None or (run is not None and run.has_rows):  # Rows of a run that has no checkpoint yet.
        # After a restart of this node alone, what was written since the checkpoint still holds.
        step = 0 if reader is None else reader.step
        resumed_at = max(step, clock.now(counter.get_counts()))
    has_states = reader is not None and checkpoints.CALLBACKS in reader.names
    return Monitor(
        logger_factory(),
        callbacks=callbacks,
        states=reader.state(checkpoints.CALLBACKS) if reader is not None and has_states else None,
        counter=counter,
        resumed_at=resumed_at,
        clock=clock,
    )
