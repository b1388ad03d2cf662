"""The live view of a program: a table of its nodes for a terminal.

```python
view = NodesView(job.status)
with rich.live.Live(get_renderable=view) as live:     # or print(view()) now and then
    job.wait()
```

Requires `rich`, which is imported when a table is made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.texts import printable, rounded

_STYLES = {"failed": "red", "killed": "red", "restarting": "yellow", "starting": "dim"}


@dataclass
class NodesView:
    """Renders the newest status as a table; rates are relative to the previous status.

    Args:
      read: returns a status in the format of `Job.status()` or `status.json`; `{}` if there is none.
      interval: seconds between two readings; calls in between return the same table.
      clock: returns seconds, for statuses without a `"time"`.
    """

    read: Callable[[], Mapping[str, Any]]
    interval: float = 1.0
    clock: Callable[[], float] = time.time
    _before: Mapping[str, Any] = field(default_factory=dict, init=False)
    _now: Mapping[str, Any] = field(default_factory=dict, init=False)

    def __call__(self) -> Any:
        """Returns a `rich.table.Table`."""
        newest = self.read()
        if newest:
            newest = {"time": self.clock(), **newest}
            passed = newest["time"] - self._now["time"] if self._now else math.inf
            if passed > 0 and passed >= self.interval:
                self._before, self._now = self._now, newest
            elif newest.get("state") != self._now.get("state"):  # the end is shown at once
                self._now = {**newest, "time": self._now["time"]}
        return nodes_table(self._now, self._before)


def nodes_table(status: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
    """Returns a `rich` table of the nodes; rates are computed from two statuses and their times.

    CPU is in percent of one core, and memory is resident memory. Messages are the calls that a node received,
    or a replay server's messages.
    """
    from rich.table import Table
    from rich.text import Text

    title = (
        f"{status.get('program', 'no program')} on {status.get('engine', '?')}: {status.get('state', '?')}"
    )
    table = Table(title=Text(printable(title)))
    table.add_column("node")
    table.add_column("state")
    for column in ("restarts", "CPU %", "memory MB", "messages/s"):
        table.add_column(column, justify="right")
    table.add_column("last error", overflow="fold")
    earlier = {node.get("label"): node for node in before.get("nodes", [])}
    seconds = status.get("time", 0.0) - before.get("time", 0.0) if before else 0.0
    for node in status.get("nodes", []):
        old = earlier.get(node["label"], {})
        memory = node.get("memory_bytes")
        cells = (
            str(node.get("restarts", 0)),
            _rate(node, old, "cpu_seconds", seconds, 100),
            "" if memory is None else f"{memory / 1e6:,.0f}",
            _rate(node, old, "calls", seconds, 1),
        )
        state = Text(printable(str(node.get("state"))), style=_STYLES.get(node.get("state", ""), ""))
        label, error = (Text(printable(str(node.get(name) or ""))) for name in ("label", "error"))
        table.add_row(label, state, *cells, error)
    return table


def _rate(node: Mapping[str, Any], old: Mapping[str, Any], name: str, seconds: float, factor: float) -> str:
    """Returns the growth of `name` per second as text; empty if it is not known, as after a restart."""
    now, then = node.get(name), old.get(name)
    if now is None or then is None or seconds <= 0 or node.get("pid") != old.get("pid"):
        return ""
    return rounded(max(0.0, now - then) / seconds * factor)
