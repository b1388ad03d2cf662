"""The worker that takes the items of a plan, and the learner that it gives to the plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from framework import flow
from framework.networks import as_tensors
from framework.programs.learner_worker import LearnerNode, ProgramLearner
from framework.programs.plan_agent import PlanAgent
from framework.programs.rollout_worker import BudgetSpent, RolloutWorker
from framework.programs.worker import Setup
from framework.replay import ReplaySample
from framework.types import Gradients, StepResult


class PlanLearner(ProgramLearner):
    """The learner of a plan. Its steps are counted, published, logged and saved when that is due.

    Flows of `concurrent` may share it: it makes one step at a time.

    Attributes:
      dataset: the agent's batches from the replay node; None without that node.
    """

    def __init__(self, setup: Setup, **options: Any):
        self._turn = threading.RLock()
        super().__init__(setup, **options)
        agent: PlanAgent = setup.agent  # type: ignore[assignment]
        self._device = agent.device
        self.busy_s = 0.0  # Seconds spent in steps.

    def step(self, sample: ReplaySample) -> StepResult:
        """One learner step on a batch in numpy, or in tensors on any device. Writes priorities to replay."""
        with self._turn:
            started = time.perf_counter()
            result = super().step(sample._replace(data=as_tensors(sample.data, self._device)))
            self.busy_s += time.perf_counter() - started
        return result

    def apply(self, gradients: Gradients) -> StepResult:
        """One optimizer step with the gradients of a `GradientWorker`."""
        with self._turn:
            started = time.perf_counter()
            result = self.learner.apply(as_tensors(gradients, self._device))
            self._count(result.metrics)
            self.busy_s += time.perf_counter() - started
        return result

    def publish(self) -> dict[str, int]:
        with self._turn:
            return super().publish()

    def close(self) -> None:
        with self._turn:
            super().close()


class PlanWorker(LearnerNode):
    """Takes the items of an agent's plan, one a `step()`, until the program's env steps are spent.

    Args:
      setup: its `agent` is a `PlanAgent`.
      workers: clients of the nodes of the plan.
      options: those of `ProgramLearner`.
    """

    _learner_class = PlanLearner
    _learner: PlanLearner

    def __init__(self, setup: Setup, *, workers: Sequence[Any], **options: Any):
        super().__init__(setup, **options)
        agent: PlanAgent = setup.agent  # type: ignore[assignment]
        self._workers = [flow.Node(client, f"actor-{index}") for index, client in enumerate(workers)]
        self._plan = agent.plan(self._workers, self._learner)

    def ready(self) -> bool:
        return not self._finished and self._plan.ready()

    def step(self) -> None:
        learner = self._learner
        started, busy = time.perf_counter(), learner.busy_s
        try:
            next(self._plan)
            self._finished = learner.finished
        except StopIteration:
            self._finished = True
        except flow.StepError as error:
            if not isinstance(error.__cause__, BudgetSpent):
                raise
            self._finished = True
            learner.publish()  # For the last evaluation.
            next(flow.Par(self._workers, RolloutWorker.finish).sync())
        learner.waited_s += time.perf_counter() - started - (learner.busy_s - busy)
