"""Program graphs of agents, the workers and services in their nodes, and the folder of a run."""

from framework.programs.loading import LoadedPolicy, load_policy
from framework.programs.make import make_program
from framework.programs.plan_agent import PlanAgent
from framework.programs.plan_worker import PlanLearner
from framework.programs.presets import Preset
from framework.programs.registry import make_agent
from framework.programs.rollout_worker import GradientWorker, RolloutWorker, concatenate
from framework.programs.run_config import RunConfig

__all__ = [
    "GradientWorker",
    "LoadedPolicy",
    "PlanAgent",
    "PlanLearner",
    "Preset",
    "RolloutWorker",
    "RunConfig",
    "concatenate",
    "load_policy",
    "make_agent",
    "make_program",
]
