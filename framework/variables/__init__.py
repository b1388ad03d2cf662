"""Parameters on their way from a learner to the actors.

A learner's node publishes into one `VariableBlock`. Each actor updates its networks with a `VariableClient`.
A *variable* is a named child of the networks; its value is the child's state dict. The *version* is the
number of learner steps and only grows.

```text
optimizer.step ─▶ block.publish(version, learner.parameters())      one copy into the block
                             │  in shared memory: every process of the machine maps the same block
                             ▼
client.update() ─▶ block.read                                       compares an integer, then one copy
                                                                    of the variables that the policy names
```

Where the block cannot be mapped (on another machine, or on an engine without shared memory), the client calls
`get_variables(names, newer_than)` of the learner's node and gets a future.
"""

from framework.variables.block import VariableBlock, Variables, shared_path
from framework.variables.client import VariableClient

__all__ = ["VariableBlock", "VariableClient", "Variables", "shared_path"]
