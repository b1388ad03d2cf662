"""Program graphs of agents, the workers and services in their nodes, and the folder of a run."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# The names above are imported when they are used: the counter's process and `repertory status` need no torch,
# which takes seconds to import and 190 MB.
_MODULES = {
    "Callback": "callbacks",
    "LoadedPolicy": "loading",
    "load_policy": "loading",
    "Graph": "make",
    "make_program": "make",
    "MultiAgentPlanAgent": "multi_agent",
    "MultiAgentWorker": "multi_agent",
    "PlanAgent": "plan_agent",
    "PlanLearner": "plan_worker",
    "Preset": "presets",
    "make_agent": "registry",
    "GradientWorker": "rollout_worker",
    "RolloutWorker": "rollout_worker",
    "concatenate": "rollout_worker",
    "stack": "rollout_worker",
    "RunConfig": "run_config",
    "Session": "session",
}


def __getattr__(name: str) -> Any:
    module = f"{__name__}.{_MODULES.get(name, name)}"
    if name not in _MODULES and (name.startswith("_") or importlib.util.find_spec(module) is None):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.import_module(module)
    if name in _MODULES:
        found = globals()[name] = getattr(found, name)  # So that this is called once for each name.
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
