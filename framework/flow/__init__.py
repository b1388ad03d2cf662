"""Dataflow plans over worker nodes: algorithms as a for-loop over items that come from many processes.

```python
def plan(workers):
    return Par(workers, Worker.sample).sync().map(concatenate).map(learner.step)

metrics = run(Worker, 4, plan, items=100, engine="processes")
```

The model is RLlib Flow (Liang et al. 2021, "RLlib Flow: Distributed Reinforcement Learning is a
Dataflow Problem"). A plan is a chain of operators. `Par` runs its steps where the nodes are, `Flow` in the
process that takes the items. Nothing runs before an item is asked for.
"""

from framework.flow.nodes import Host as Host
from framework.flow.nodes import LocalNode as LocalNode
from framework.flow.nodes import Node as Node
from framework.flow.nodes import StepError as StepError
from framework.flow.nodes import worker_node as worker_node
from framework.flow.operators import Flow as Flow
from framework.flow.operators import NotReady as NotReady
from framework.flow.operators import alternate as alternate
from framework.flow.operators import concurrent as concurrent
from framework.flow.parallel import Par as Par
from framework.flow.running import run as run
