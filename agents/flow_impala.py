"""IMPALA as a plan: networks, loss and learner come from `agents.impala`; workers sample ahead."""

from __future__ import annotations

from collections.abc import Sequence

from agents import impala
from framework.flow import Flow, Node, Par
from framework.programs import PlanLearner, RolloutWorker, concatenate


class FlowIMPALA(impala.IMPALA):
    """V-trace actor-critic as a plan.

    A batch is the next `batch_size` unrolls that are ready. Meanwhile each worker collects
    `queue_batches + prefetch_batches - 1` samples ahead, with older parameters.
    """

    @property
    def items_per_step(self) -> int:
        return self.num_envs  # of one worker; the plan joins the unrolls of several

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        config, envs = self.config, self.num_envs // len(workers)
        if config.batch_size % envs:
            raise ValueError(
                f"batch_size: got {config.batch_size}, expected a multiple of {envs}, the envs of a worker."
            )
        ahead = config.queue_batches + config.prefetch_batches - 1
        samples = Par(workers, RolloutWorker.sample).unordered(depth=ahead)
        return samples.batch(config.batch_size // envs).map(concatenate).map(learner.step)


PRESETS = impala.PRESETS
