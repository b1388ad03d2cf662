"""Program graphs of agents, the workers and services in their nodes, and the folder of a run."""

from framework.programs.callbacks import Callback
from framework.programs.loading import LoadedPolicy, load_policy
from framework.programs.make import make_program
from framework.programs.presets import Preset
from framework.programs.registry import make_agent
from framework.programs.run_config import RunConfig

__all__ = [
    "Callback",
    "LoadedPolicy",
    "Preset",
    "RunConfig",
    "load_policy",
    "make_agent",
    "make_program",
]
