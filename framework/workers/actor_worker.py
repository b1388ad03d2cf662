"""The worker of an actor node: a collector behind gates."""

from __future__ import annotations

import functools
import sys
import uuid
from typing import Any

import launch
from framework.replay.errors import ServerClosed
from framework.workers.collector import Collector, Turns, flush_pending, make_collector, make_served
from framework.workers.gates import Budget, Gate, LostSteps
from framework.workers.last_samples import LastSamples
from framework.workers.lockstep import Lockstep, Unrolls
from framework.workers.report import Report
from framework.workers.worker import (
    ProgramWorker,
    Setup,
    describe_tables,
    is_elastic,
    next_seed,
    prepare_process,
)
from launch.context import find_context

_MOST_STEPS = 8  # The most in one call, for an agent without unrolls that wait.


class ActorWorker(ProgramWorker):
    """Acts for the B envs of one actor until the budget of env steps is spent.

    One `step()` is as many steps of its collector as every gate is open for: the lockstep of an agent with a
    limited policy lag, and the budget. Others make a few, or one where the engine asks at each step whether
    replay takes it. When the budget is spent, other gates keep the actor from ending too early.

    Args:
      setup: makes the environment, the networks, the policy and the adder.
      replay: the replay client of the adder. None for an agent that stores nothing.
      learner: the variable source. None for an agent without parameters.
      counter: a client of the `Counter`, which grants and counts steps.
      monitor: takes the rows of metrics.
      checkpointer: keeps the counts of this actor. None keeps nothing.
      name: name of the group of actors. This actor is `NAME-INDEX`.
      index: index of this actor.
      seed: seed of this actor's environments and policy; see `next_seed`.
      inference: the inference server, for the modes that need one.
      steps_name: name of the count of the learner's steps.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        replay: Any,
        learner: Any,
        counter: Any,
        monitor: Any,
        checkpointer: Any = None,
        name: str = "actor",
        index: int = 0,
        seed: int = 0,
        inference: Any = None,
        steps_name: str = "learner_steps",
    ):
        prepare_process(seed)
        agent, config, own = setup.agent, setup.config, f"{name}-{index}"
        self._replay, self._envs = replay, config.envs_per_actor
        state = None if checkpointer is None else checkpointer.get(own)
        life = uuid.uuid4().hex if is_elastic(config) else ""
        turns = 2 if config.inference == "alternating+server" else 1
        unrolls = None
        if agent.max_policy_lag is not None and learner is not None:
            unrolls = Unrolls.of(agent, config.num_actors, turns)
        make_adder = lambda: None if replay is None else agent.make_adder(replay, setup.spec)  # noqa: E731
        seed = next_seed(seed, state)
        if inference is None:
            collector: Collector | Turns = make_collector(
                setup, index, seed, learner, agent.make_policy, make_adder
            )
        else:
            ahead = (lambda: True) if unrolls is None else unrolls.go_on
            collector = make_served(setup, own, index, seed, inference, make_adder, ahead)
        self._collector = collector
        self._gates: list[Gate] = []  # They are asked before a step.
        self._exits: list[Gate] = []  # They are asked when no steps are granted any more.
        if unrolls is not None:
            self._gates.append(Lockstep(own, learner, counter, collector, unrolls))
        # Off-policy, or from a queue; with a limited policy lag, the lockstep waits for the last batch.
        self._until_end = unrolls is not None and unrolls.of_episodes
        # An actor without unrolls looks for parameters more often. On the serial engine, a step that finds no
        # room must be the first of a call, because only another node can make room.
        node = find_context()
        self._asks_room = unrolls is None and node is not None and node.engine == "serial"
        self._most = sys.maxsize if unrolls is not None else _MOST_STEPS
        drains = unrolls is None and replay is not None and learner is not None
        limit = None if unrolls is None else functools.partial(unrolls.limit, self._envs)
        self._budget = Budget(own, counter, self._envs, limit=limit, life=life, holds=drains)
        self._gates.append(self._budget)
        if life:
            self._exits.append(LostSteps(counter))
        if drains:
            self._exits.append(LastSamples(own, replay, counter, steps_name, collector))
        services = {"counter": counter, "monitor": monitor, "checkpointer": checkpointer}
        self._report = Report(
            setup, collector, self._budget, state, name=own, steps_name=steps_name, **services
        )
        self._started = False

    def ready(self) -> bool:
        return self._collector.ready() and all(gate.ready() for gate in self._gates)

    def why_not_ready(self) -> str:
        """The text that the serial engine prints in a deadlock."""
        if not self._collector.ready():
            return (
                "its adder waits until replay accepts the items of a step of its "
                f"{self._envs} envs: {describe_tables(self._replay)}. Use fewer envs, or a rate limiter with "
                "a larger buffer."
            )
        return "".join(gate.why() for gate in self._gates)

    def step(self) -> None:
        if not self._started:  # The constructor is too early: the learner may not have started yet.
            self._started = True
            self._collector.update()
        for gate in self._gates:
            if not gate.open():
                flush_pending(self._collector.adders)
                if gate is self._budget and all(each.open() for each in self._exits):
                    self._finish()
                return  # The caller checks for a stop of the program, and calls again.
        most = self._collector.room() if self._asks_room else self._most
        num_steps = min(most, *[gate.most() for gate in self._gates])
        stops = launch.stop_event().is_set
        steps = self._collector.collect(num_steps, self._budget.left, stops, self._until_end)
        for gate in self._gates:
            gate.took(steps)
        self._report.took(steps)

    def recover(self, error: ServerClosed) -> bool:
        """Continues with new adders and episodes; False if the server did not restart, or was stopped."""
        return self._collector.recover(error)

    def close(self) -> None:
        """Reports the last counts, saves the state for the last checkpoint, and closes the environments."""
        try:
            if not self._finished:
                self._finish()
        finally:
            self._collector.close()

    def save(self) -> dict[str, Any]:
        """See `Report.save`."""
        return self._report.save()

    def _finish(self) -> None:
        self._finished = True
        # Items that a rate limiter refuses now stay out: no learner samples any more.
        self._report.dropped_items += self._collector.close_adder(timeout=0.2)
        for gate in self._gates:
            gate.end()
        self._report.end()
