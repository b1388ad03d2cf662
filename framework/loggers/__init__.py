"""Loggers: rows of named scalars to the terminal and to files. Nothing written is dropped.

```python
with JSONLLogger("run/metrics.jsonl") as log:
    log.write({"label": "learner", "steps": 100, "loss": 0.25, "time/learner_steps_per_s": 812.0})
```
"""

from framework.loggers.base import (
    TIME_PREFIX,
    Dispatcher,
    InMemoryLogger,
    Logger,
    TerminalLogger,
    to_scalars,
    without_times,
)
from framework.loggers.files import CSVLogger, JSONLLogger, read_jsonl
from framework.loggers.progress import ProgressDisplay
from framework.loggers.tensorboard import TensorBoardLogger

__all__ = [
    "TIME_PREFIX",
    "CSVLogger",
    "Dispatcher",
    "InMemoryLogger",
    "JSONLLogger",
    "Logger",
    "ProgressDisplay",
    "TensorBoardLogger",
    "TerminalLogger",
    "read_jsonl",
    "to_scalars",
    "without_times",
]
