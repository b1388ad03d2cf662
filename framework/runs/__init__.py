"""A run: its settings, its folder, the agents that it may name, and its services."""

from typing import TYPE_CHECKING

from framework.lazy import exports

if TYPE_CHECKING:
    from framework.commands.plot import plot as plot
    from framework.experiments.run import Run as Run

__getattr__, __dir__ = exports(__name__)
