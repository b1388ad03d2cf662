"""Checkpoints: folders that are written atomically and verified when they are read.

```python
checkpointer = Checkpointer("run/checkpoints", keep=3)
checkpointer.save(step, {"learner": torch_part(learner.save()), "replay": write_a_folder})
reader = checkpointer.restore()                       # the newest, every file of it verified
learner.restore(reader.state("learner"))
```
"""

from framework.checkpoints.checkpointer import (
    Checkpointer,
    CheckpointError,
    CheckpointReader,
    Part,
    package_versions,
)
from framework.checkpoints.state import torch_part

__all__ = ["CheckpointError", "CheckpointReader", "Checkpointer", "Part", "package_versions", "torch_part"]
