"""The engine ``launchpad`` with threads of one process in place of processes (``local_mt``)."""

from __future__ import annotations

from launch.engines import launchpad
from launch.engines.base import Options
from launch.program import Program


def start(program: Program, options: Options) -> launchpad.LaunchpadJob:
    """Starts the program under ``lp.launch(..., "local_mt")``."""
    return launchpad.start(program, options, "local_mt")
