"""The former base class of agents whose algorithm is a plan. Any agent with a `plan` is one."""

from __future__ import annotations

from framework.plans.rollout_worker import RolloutWorker
from framework.torch_agents import TorchAgent


class PlanAgent(TorchAgent):
    """A `TorchAgent` whose `worker_class` is set; programs written for it go on to work."""

    worker_class: type[RolloutWorker] = RolloutWorker
