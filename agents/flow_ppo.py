"""PPO as a plan: networks, loss and learner come from `agents.ppo`; a step learns from all workers."""

from __future__ import annotations

from collections.abc import Sequence

from agents import ppo
from framework.core import NetworksFn
from framework.flow import Flow, Node, Par
from framework.programs import PlanLearner, RolloutWorker, concatenate


class FlowPPO(ppo.PPO):
    """Proximal policy optimization as a plan. Workers wait while the learner makes its epochs."""

    def __init__(self, config: ppo.PPOConfig | None = None, networks_fn: NetworksFn | None = None):
        super().__init__(config, networks_fn)
        if self.config.max_policy_lag:
            raise ValueError(
                f"max_policy_lag: got {self.config.max_policy_lag}, expected 0: the workers of this plan "
                "wait for the learner. Use PPO."
            )

        if self.config.episodes_per_batch is not None:
            raise ValueError(
                f"episodes_per_batch: got {self.config.episodes_per_batch}, expected None for a plan, whose "
                "workers collect unrolls. Use PPO."
            )

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        return Par(workers, RolloutWorker.sample).sync().map(concatenate).map(learner.step)


PRESETS = ppo.PRESETS
