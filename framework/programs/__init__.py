"""The program graphs of agents, and the public names of `runs` and `plans`."""

from typing import TYPE_CHECKING

from framework.lazy import exports

if TYPE_CHECKING:
    from framework.core import Graph as Graph
    from framework.plans.multi_agent import MultiAgentPlanAgent as MultiAgentPlanAgent
    from framework.plans.multi_agent import MultiAgentWorker as MultiAgentWorker
    from framework.plans.plan_agent import PlanAgent as PlanAgent
    from framework.plans.plan_worker import PlanLearner as PlanLearner
    from framework.plans.rollout_worker import GradientWorker as GradientWorker
    from framework.plans.rollout_worker import RolloutWorker as RolloutWorker
    from framework.plans.rollout_worker import concatenate as concatenate
    from framework.plans.rollout_worker import stack as stack
    from framework.programs.greedy import GreedyPolicy as GreedyPolicy
    from framework.programs.loading import LoadedPolicy as LoadedPolicy
    from framework.programs.loading import load_policy as load_policy
    from framework.programs.make import make_program as make_program
    from framework.runs.callbacks import Callback as Callback
    from framework.runs.presets import Preset as Preset
    from framework.runs.registry import make_agent as make_agent
    from framework.runs.run_config import RunConfig as RunConfig
    from framework.session import Session as Session

__getattr__, __dir__ = exports(__name__)
