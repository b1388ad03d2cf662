"""From agents to program graphs, and the workers and services that sit in their nodes."""

from framework.programs.make import make_program as make_program
from framework.programs.run_config import RunConfig as RunConfig
