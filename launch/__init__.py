"""Programs of nodes that call each other, and engines that run them. Independent of reinforcement learning.

```python
import launch as lp

program = lp.Program("sum")
adder = program.add_node(lp.CourierNode(Adder), label="adder")
program.add_node(lp.PyNode(main, adder), label="main")      # main(client) ends with lp.stop(result)
result = lp.launch(program, engine="processes")
```
"""

from launch.batching import batched_handler
from launch.context import (
    NodeContext,
    get_node_context,
    make_program_stopper,
    register_stop_handler,
    shared_memory_directory,
    stop,
    stop_event,
    unregister_stop_handler,
    wait_for_stop,
)
from launch.engines.base import Job, Resources
from launch.errors import (
    CallLost,
    CallTimeout,
    ClientClosed,
    DeadlockError,
    LaunchError,
    NodeError,
    ProgramStopped,
    RemoteError,
    RemoteTraceback,
    StopTimeoutWarning,
)
from launch.handles import Client, Handle
from launch.nodes import (
    CacherNode,
    CourierNode,
    MultiProcessingColocation,
    MultiThreadingColocation,
    Node,
    PyClassNode,
    PyNode,
    ReplayNode,
    ReverbNode,
)
from launch.program import Program
from launch.running import ProgramInterrupted, launch, start

# Launchpad's names.
CourierClient = Client
CourierHandle = Handle

__all__ = [
    "CacherNode",
    "CallLost",
    "CallTimeout",
    "Client",
    "ClientClosed",
    "CourierClient",
    "CourierHandle",
    "CourierNode",
    "DeadlockError",
    "Handle",
    "Job",
    "LaunchError",
    "MultiProcessingColocation",
    "MultiThreadingColocation",
    "Node",
    "NodeContext",
    "NodeError",
    "Program",
    "ProgramInterrupted",
    "ProgramStopped",
    "PyClassNode",
    "PyNode",
    "RemoteError",
    "RemoteTraceback",
    "ReplayNode",
    "Resources",
    "ReverbNode",
    "StopTimeoutWarning",
    "batched_handler",
    "get_node_context",
    "launch",
    "make_program_stopper",
    "register_stop_handler",
    "shared_memory_directory",
    "start",
    "stop",
    "stop_event",
    "unregister_stop_handler",
    "wait_for_stop",
]
