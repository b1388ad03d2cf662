"""Loggers: rows of named scalars to the terminal and to files. Nothing written is dropped.

```python
with JSONLLogger("run/metrics.jsonl") as log:
    log.write({"label": "learner", "learner_steps": 100, "loss": 0.25, "time/steps_per_second": 812.0})
```
"""

from framework.loggers.base import TIME_PREFIX, Dispatcher, InMemoryLogger, Logger, to_scalars, without_times
from framework.loggers.csv import CSVLogger
from framework.loggers.jsonl import JSONLLogger, read_jsonl
from framework.loggers.progress import ProgressDisplay
from framework.loggers.tensorboard import TensorBoardLogger
from framework.loggers.terminal import TerminalLogger

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
