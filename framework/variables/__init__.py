"""Parameters from a learner to those who act.

A learner's node publishes into one `VariableBlock`; whoever acts keeps its networks fresh with a
`VariableClient`. A *variable* is a child of the networks by name; its value is that child's state dict. The
*version* is the number of learner steps, and it only grows.

```text
optimizer.step ─▶ block.publish(version, learner.parameters())      one copy into the block
                             │  in shared memory: every process of the machine maps the same block
                             ▼
client.update() ─▶ block.read                                       compares an integer, then one copy
                                                                    of the variables that the policy names
```

Where the block cannot be mapped (another machine, an engine without shared memory) the client asks
`get_variables(names, newer_than)` of the learner's node by future instead.
"""

from framework.variables.block import VariableBlock, Variables, shared_path
from framework.variables.client import VariableClient

__all__ = ["VariableBlock", "VariableClient", "Variables", "shared_path"]
