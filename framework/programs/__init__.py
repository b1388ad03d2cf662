"""Program graphs of agents, the workers and services in their nodes, and the folder of a run."""

from framework.programs.callbacks import Callback as Callback
from framework.programs.loading import LoadedPolicy as LoadedPolicy
from framework.programs.loading import load_policy as load_policy
from framework.programs.make import Graph as Graph
from framework.programs.make import make_program as make_program
from framework.programs.multi_agent import MultiAgentPlanAgent as MultiAgentPlanAgent
from framework.programs.multi_agent import MultiAgentWorker as MultiAgentWorker
from framework.programs.plan_agent import PlanAgent as PlanAgent
from framework.programs.plan_worker import PlanLearner as PlanLearner
from framework.programs.presets import Preset as Preset
from framework.programs.registry import make_agent as make_agent
from framework.programs.rollout_worker import GradientWorker as GradientWorker
from framework.programs.rollout_worker import RolloutWorker as RolloutWorker
from framework.programs.rollout_worker import concatenate as concatenate
from framework.programs.rollout_worker import stack as stack
from framework.programs.run_config import RunConfig as RunConfig
from framework.programs.session import Session as Session
