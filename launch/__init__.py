"""Programs of nodes that call each other, and engines that run them. Independent of reinforcement learning.

```python
import launch as lp

program = lp.Program("sum")
adder = program.add_node(lp.CourierNode(Adder), label="adder")
program.add_node(lp.PyNode(main, adder), label="main")      # main(client) ends with lp.stop(result)
result = lp.launch(program, engine="processes")
```
"""

import functools
from importlib import metadata
from typing import Any

from launch.batching import batched_handler as batched_handler
from launch.context import NodeContext as NodeContext
from launch.context import get_node_context as get_node_context
from launch.context import make_failure_handler as make_failure_handler
from launch.context import make_program_stopper as make_program_stopper
from launch.context import register_loss_handler as register_loss_handler
from launch.context import register_stop_handler as register_stop_handler
from launch.context import shared_memory_directory as shared_memory_directory
from launch.context import stop as stop
from launch.context import stop_event as stop_event
from launch.context import unregister_stop_handler as unregister_stop_handler
from launch.context import wait_for_stop as wait_for_stop
from launch.engines.base import Job as Job
from launch.engines.options import Resources as Resources
from launch.errors import CallLost as CallLost
from launch.errors import CallTimeout as CallTimeout
from launch.errors import ClientClosed as ClientClosed
from launch.errors import DeadlockError as DeadlockError
from launch.errors import LaunchError as LaunchError
from launch.errors import NodeError as NodeError
from launch.errors import ProgramStopped as ProgramStopped
from launch.errors import RemoteError as RemoteError
from launch.errors import RemoteTraceback as RemoteTraceback
from launch.errors import StopTimeoutWarning as StopTimeoutWarning
from launch.handles import Handle as Handle
from launch.handles import HandleGroup as HandleGroup
from launch.handles import NodeClient as NodeClient
from launch.nodes import CacherNode as CacherNode
from launch.nodes import CourierNode as CourierNode
from launch.nodes import MultiProcessingColocation as MultiProcessingColocation
from launch.nodes import MultiThreadingColocation as MultiThreadingColocation
from launch.nodes import ProgramNode as ProgramNode
from launch.nodes import PyClassNode as PyClassNode
from launch.nodes import PyNode as PyNode
from launch.nodes import ServerNode as ServerNode
from launch.program import Program as Program
from launch.running import ProgramInterrupted as ProgramInterrupted
from launch.running import launch as launch
from launch.running import start as start

# Launchpad's names.
CourierClient = NodeClient
CourierHandle = Handle


@functools.cache
def _nodes() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group="launch.nodes")}


def __getattr__(name: str) -> Any:
    """The nodes of other packages, which are entry points of the group `launch.nodes`: `ReplayNode`, say."""
    if name.startswith("_") or name not in _nodes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _nodes()[name].load()
    return found
