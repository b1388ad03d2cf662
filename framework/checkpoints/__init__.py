"""Checkpoints: folders that are written atomically and verified when they are read.

```python
checkpointer = Checkpointer("run/checkpoints", keep=3)
checkpointer.save(step, {"learner": torch_part(learner.save()), "replay": write_a_folder})
reader = checkpointer.restore()                       # the newest, every file of it verified
learner.restore(reader.state("learner"))
```
"""

from framework.checkpoints.checkpointer import Checkpointer as Checkpointer
from framework.checkpoints.checkpointer import package_versions as package_versions
from framework.checkpoints.folder import CheckpointError as CheckpointError
from framework.checkpoints.folder import CheckpointReader as CheckpointReader
from framework.checkpoints.folder import Part as Part
from framework.checkpoints.state import torch_part as torch_part
