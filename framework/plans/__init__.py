"""Agents whose algorithm is a plan over workers, and the workers in its nodes."""

from typing import TYPE_CHECKING

from framework.lazy import exports

if TYPE_CHECKING:
    from framework.plans.multi_agent import MultiAgentPlanAgent as MultiAgentPlanAgent
    from framework.plans.multi_agent import MultiAgentWorker as MultiAgentWorker
    from framework.plans.plan_agent import PlanAgent as PlanAgent
    from framework.plans.plan_worker import PlanLearner as PlanLearner
    from framework.plans.rollout_worker import GradientWorker as GradientWorker
    from framework.plans.rollout_worker import RolloutWorker as RolloutWorker
    from framework.plans.rollout_worker import concatenate as concatenate
    from framework.plans.rollout_worker import stack as stack

__getattr__, __dir__ = exports(__name__)
