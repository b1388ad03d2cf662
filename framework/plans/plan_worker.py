"""The worker that takes the items of a plan, and the learner that it gives to the plan."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import launch
from framework import flow
from framework.networks import as_tensors
from framework.plans.rollout_worker import BudgetSpent, PlanOver, RolloutWorker
from framework.replay import ReplaySample
from framework.torch_agents import TorchAgent
from framework.types import Gradients, StepResult
from framework.workers.learner import ProgramLearner
from framework.workers.learner_worker import LearnerNode
from framework.workers.worker import Setup


class PlanLearner:
    """The program's learner, as a plan uses it. It counts its steps, and publishes, logs and saves when due.

    A branch of the plan may call it from a thread of its own (`flow.concurrent`). It makes one
    step at a time, and raises `launch.ProgramStopped` after the last one.

    Args:
      program: the learner of the program.
      device: the device of its batches.
      replay: a client of the replay node. None without that node.

    Attributes:
      learner: the agent's learner.
      dataset: the agent's batches from the replay node; None without that node.
      busy_s: seconds spent in steps.
    """

    def __init__(self, program: ProgramLearner, device: str, replay: Any = None):
        self._program, self._device, self._replay = program, device, replay
        self.learner, self.dataset, self.busy_s = program.learner, program.dataset, 0.0
        self._stepping = program.stepping
        self._tables: list[str] | None = None  # The replay node's.
        self._ended = False

    def step(self, sample: ReplaySample) -> StepResult:
        """One learner step on a batch in numpy, or in tensors on any device. Writes priorities to replay."""
        with self._step():
            return self._program.step(sample._replace(data=as_tensors(sample.data, self._device)))

    def apply(self, gradients: Gradients) -> StepResult:
        """One optimizer step with the gradients of a `GradientWorker`."""
        with self._step():
            return self._program.apply(as_tensors(gradients, self._device))

    def publish(self) -> dict[str, int]:
        """Publishes the parameters between two steps, also while another branch learns."""
        with self._stepping:
            return self._program.published.publish()

    def batches(self) -> flow.Flow:
        """The agent's batches from the replay node."""
        assert self.dataset is not None, "batches: there is no replay node. Give one to add_plan."
        return flow.Flow.of(self.dataset, self.dataset.ready)

    def replay_accepts(self) -> bool:
        """Whether every table of the replay node takes another item without a wait."""
        if self._tables is None:
            self._tables = [*self._replay.server_info()]
        return all(self._replay.can_insert(table) for table in self._tables)

    def end(self) -> None:
        """Waits for the step in progress; there are no further ones."""
        with self._stepping:
            self._ended = True

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        with self._stepping:
            if self._ended or self._program.finished():
                raise launch.ProgramStopped("learner: the program stops.")
            started = time.perf_counter()
            yield
            self.busy_s += time.perf_counter() - started


class LearnerParts(NamedTuple):
    """What one of the learners of a plan is made from.

    Attributes:
      setup: has the learner's agent.
      seed: seed of the initial parameters.
      replay: a client of its replay node. None without one.
    """

    setup: Setup
    seed: int
    replay: Any = None


class PlanWorker(LearnerNode):
    """Takes the items of an agent's plan, one per `step()`, until the program's env steps are spent.

    A plan that ends by itself ends the program. With several learners, the first one that has made all of
    its steps ends the program.

    Args:
      setup: its `agent` has a `plan`.
      workers: clients of the nodes of the plan.
      replay: a client of the replay node. None without that node.
      learners: the parts of several learners by name, of which the plan then gets a dict.
      options: `ProgramLearner`'s.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        workers: Sequence[Any],
        replay: Any = None,
        learners: Mapping[str, LearnerParts] | None = None,
        seed: int = 0,
        **options: Any,
    ):
        parts = learners or {"learner": LearnerParts(setup, seed, replay)}
        (name, first), *others = parts.items()
        super().__init__(first.setup, replay=first.replay, seed=first.seed, name=name, **options)
        for other, (own, own_seed, own_replay) in others:
            made = ProgramLearner(own, replay=own_replay, seed=own_seed, name=other, **options)
            self._learners[other] = made
        agent: TorchAgent = setup.agent  # type: ignore[assignment]
        self._plan_learners = {
            each: PlanLearner(self._learners[each], part.setup.agent.device, part.replay)  # type: ignore[attr-defined]
            for each, part in parts.items()
        }
        self._workers = [flow.Node(client, f"actor-{index}") for index, client in enumerate(workers)]
        self._plan = agent.plan(self._workers, self._plan_learners if learners else self._plan_learners[name])
        if not isinstance(self._plan, flow.Flow):  # An error would end a generator.
            raise TypeError(
                f"plan: got {type(self._plan).__name__}, expected a flow.Flow, such as Flow.transform makes."
            )
        self._is_ending = False  # Whether a worker had too few env steps left for a call.
        self._over: set[str] = set()  # Workers of which nothing is left to learn either.

    def ready(self) -> bool:
        return self._has_finished() or self._is_ending or self._plan.ready()

    def step(self) -> None:
        if self._has_finished():  # Since it was restored, or by another thread, whose last step published.
            self._end_program("max_learner_steps")
            return
        if self._is_ending and not self._plan.ready():  # It waits for what does not come any more.
            self._end()
            return
        started, busy = time.perf_counter(), self._busy_s()
        try:
            next(self._plan)
        except flow.NotReady:
            pass  # A part of an item: other nodes have to make the next part possible.
        except StopIteration:
            self._finished = True
            if not launch.stop_event().is_set():
                self._end_program("plan_ended")
        except flow.StepError as error:
            if not isinstance(error.__cause__, BudgetSpent):
                raise
            self._is_ending = True
            if isinstance(error.__cause__, PlanOver) and self._are_over(error):
                self._end()
        waited = time.perf_counter() - started - (self._busy_s() - busy)
        for learner in self._learners.values():
            learner.report.waited_s += waited

    def _has_finished(self) -> bool:
        return any(learner.finished() for learner in self._learners.values())

    def _busy_s(self) -> float:
        return sum(learner.busy_s for learner in self._plan_learners.values())

    def _end_program(self, reason: str) -> None:
        self._finished = True
        self._end_learners()
        for learner in self._learners.values():
            learner.end_program(reason)

    def _end_learners(self) -> None:
        """Waits for the steps in progress; there are no further ones."""
        for learner in self._plan_learners.values():
            learner.end()

    def _are_over(self, error: flow.StepError) -> bool:
        """Whether nothing is left to learn of the workers called so far. Calls may wait until it learns."""
        self._over.add(error.node)
        called = [node for node in self._workers if node.was_called]
        if not error.round_ended:
            return len(self._over) == len(called)
        return all(next(flow.Par(called, operator.attrgetter("is_over")).sync()))

    def _end(self) -> None:
        self._finished = True
        self._end_learners()
        for learner in self._learners.values():
            learner.published.publish()  # The last evaluation needs them.
        next(flow.Par(self._workers, RolloutWorker.finish).sync())

    def close(self) -> None:
        self._end_learners()
        super().close()
