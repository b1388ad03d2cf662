"""What agents are made of.

- ``core``, ``types``, ``specs``: the contracts, the data and its description.
- ``environments``: anything as a batched environment.
- ``actors``, ``adders``: acting, the loop that steps an environment, and experience as replay items.
- ``replay``, ``datasets``: the Reverb-style server, and its items as batches.
- ``learners``, ``losses``, ``networks``: batches as parameters.
- ``programs``: agents as program graphs, for ``launch``.
- ``checkpoints``, ``loggers``, ``commands``: what a run keeps, and the command line.
- ``train``, ``experiments``: a run as one call.
"""

from framework import interrupts

if interrupts.is_command():  # First of all, since what it imports takes seconds.
    interrupts.leave_at_once()

import importlib.util
from typing import TYPE_CHECKING

from framework.lazy import exports

if TYPE_CHECKING:
    from framework.experiments.train import train as train

__getattr__, __dir__ = exports(__name__)
_launch = importlib.util.find_spec("launch")
if _launch is not None and _launch.submodule_search_locations is None:
    # The folder of a script comes first on `sys.path`, and Launchpad's examples have this name.
    raise ImportError(
        f"launch: got {_launch.origin}, expected Repertory's package, which it hides. Rename that file."
    )
