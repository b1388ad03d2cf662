"""The live view of a run: a progress bar and a table of the numbers that matter."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from framework.loggers.base import format_value

_BAR_WIDTH = 40


class ProgressDisplay:
    """Shows the snapshots of a program's monitor: in place on a terminal, as periodic lines elsewhere.

    ```python
    with ProgressDisplay(max_env_steps=50_000, target_return=475.0) as display:
        display.update(monitor.snapshot())
    ```

    Args:
      max_env_steps: end of the bar; None shows no bar and no remaining time.
      target_return: shown beside the return.
      console: a `rich.console.Console`; None writes to standard output.
      line_every: seconds between two lines if the output is not a terminal.
      clock: returns seconds, for tests.
      below: returns a renderable to show under the numbers on a terminal, such as a table of the program's
        nodes; lines do not include it.
    """

    def __init__(
        self,
        max_env_steps: int | None = None,
        target_return: float | None = None,
        console: Any = None,
        line_every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        below: Callable[[], Any] | None = None,
    ):
        from rich.console import Console

        self._max_steps = max_env_steps
        self._target = target_return
        self._console = console or Console()
        self._line_every = line_every
        self._clock = clock
        self._below = below
        self._meter = _Meter(clock)
        self._last_line: float | None = None
        self._shown: Mapping[str, Any] | None = None
        self._live: Any = None

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        """Shows `{"counts": {name: count}, "labels": {label: newest row}}`.

        None means that there is no new snapshot, as while the program starts; then only `below` is updated.
        """
        if snapshot is not None:
            self._shown = snapshot
            self._meter.update(snapshot.get("counts", {}))
        if self._console.is_terminal:
            if snapshot is not None or self._below is not None:
                self._live_view().update(self.render(), refresh=True)
        elif snapshot is not None and self._is_due(snapshot):
            self._last_line = self._clock()
            self._console.print(self.line(), highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Leaves the last state on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._shown is not None and not self._console.is_terminal:
            self._console.print(self.line(), highlight=False, soft_wrap=True, markup=False)
        self._shown = None

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def numbers(self) -> dict[str, str]:
        """Returns the texts to show by heading."""
        snapshot = self._shown or {}
        counts = snapshot.get("counts", {})
        labels = snapshot.get("labels", {})
        learner = labels.get("learner", {})
        steps = counts.get("env_steps", 0)
        result = {"env steps": f"{steps:,}" + (f" / {self._max_steps:,}" if self._max_steps else "")}
        result["env steps/s"] = _rate(self._meter.rate("env_steps"))
        if "learner_steps" in counts:
            result["learner steps"] = f"{counts['learner_steps']:,}"
            result["learner steps/s"] = _rate(self._meter.rate("learner_steps"))
        returns = [row["episode_return"] for label, row in labels.items()
                   if label.startswith("actor") and "episode_return" in row]  # fmt: skip
        if returns:
            result["return, acting"] = f"{sum(returns) / len(returns):.1f}"
        evaluated = labels.get("evaluator", {})
        if "episode_return" in evaluated:
            goal = f" (goal {self._target:g})" if self._target is not None else ""
            at = f" at step {evaluated['env_steps']:,}" if "env_steps" in evaluated else ""
            result["return, greedy"] = f"{evaluated['episode_return']:.1f}{goal}{at}"
        for name, value in learner.items():
            if name.startswith("replay") and name.endswith("/samples_per_insert"):
                result["samples per insert"] = f"{value:.2f}"
        if "loss" in learner:
            result["loss"] = format_value(learner["loss"])
        result["time to go"] = self._time_to_go(steps)
        return result

    def line(self) -> str:
        """Returns the numbers on one line."""
        return " | ".join(f"{name} {text}" for name, text in self.numbers().items())

    def render(self) -> Any:
        """Returns the bar, the table and `below`, for rich."""
        from rich.console import Group

        parts = [] if self._shown is None else [self._render_numbers()]
        if self._below is not None:
            parts.append(self._below())
        return Group(*parts)

    def _render_numbers(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        numbers = self.numbers()
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
        for name, text in numbers.items():
            table.add_row(name, text)
        if not self._max_steps:
            return table
        counts = (self._shown or {}).get("counts", {})
        bar = ProgressBar(self._max_steps, counts.get("env_steps", 0), width=_BAR_WIDTH)
        view = Table.grid()
        view.add_row(bar)
        view.add_row(table)
        return view

    def _is_due(self, snapshot: Mapping[str, Any]) -> bool:
        """Returns whether a line is due; the first one is due with the first env steps."""
        if self._last_line is None:
            return bool(snapshot.get("counts", {}).get("env_steps"))
        return self._clock() - self._last_line >= self._line_every

    def _live_view(self) -> Any:
        if self._live is None:
            from rich.live import Live

            # Redrawn at every update, so that no thread is needed.
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self._live

    def _time_to_go(self, steps: int) -> str:
        rate = self._meter.rate("env_steps")
        if not self._max_steps or not rate:
            return "?"
        seconds = max(0, round((self._max_steps - steps) / rate))
        return f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


class _Meter:
    """Growth of counts per second over about the last ten seconds."""

    def __init__(self, clock: Callable[[], float], window: float = 10.0):
        self._clock = clock
        self._window = window
        self._seen: list[tuple[float, dict[str, float]]] = []

    def update(self, counts: Mapping[str, Any]) -> None:
        now = self._clock()
        self._seen.append((now, dict(counts)))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window:
            self._seen.pop(0)

    def rate(self, name: str) -> float | None:
        if len(self._seen) < 2:
            return None
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last.get(name, 0) - first.get(name, 0)) / (end - start) if end > start else None


def _rate(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"
