"""Loggers: rows of named scalars to the terminal and to files. Nothing written is dropped.

```python
with JSONLLogger("run/metrics.jsonl") as log:
    log.write({"label": "learner", "steps": 100, "loss": 0.25, "time/learner_steps_per_s": 812.0})
```
"""

from framework.loggers.base import TIME_PREFIX as TIME_PREFIX
from framework.loggers.base import Dispatcher as Dispatcher
from framework.loggers.base import InMemoryLogger as InMemoryLogger
from framework.loggers.base import Logger as Logger
from framework.loggers.base import TerminalLogger as TerminalLogger
from framework.loggers.base import to_scalars as to_scalars
from framework.loggers.base import without_times as without_times
from framework.loggers.files import CSVLogger as CSVLogger
from framework.loggers.files import JSONLLogger as JSONLLogger
from framework.loggers.files import read_jsonl as read_jsonl
from framework.loggers.progress import ProgressDisplay as ProgressDisplay
from framework.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from framework.loggers.wandb import WandbLogger as WandbLogger
