"""The live view of a run: a progress bar and a table of the numbers that matter."""

from __future__ import annotations

import collections
import io
import time
from collections.abc import Callable, Mapping
from typing import Any

from framework.clock import ENV_STEPS, Clock
from framework.loggers.base import format_value
from launch.texts import printable, rounded

_BAR_WIDTH = 40
_WINDOW_S = 10.0  # Rates are of about this time,
_LONGEST_S = 120.0  # or of up to this time for learner steps, until there is one.


class ProgressDisplay:
    """Shows the snapshots of a program's monitor: in place on a terminal or in a notebook, else as lines.

    ```python
    with ProgressDisplay(max_env_steps=50_000, target_return=475.0) as display:
        display.update(monitor.snapshot())
    ```

    Args:
      max_env_steps: end of the bar; None shows no bar and no remaining time.
      max_learner_steps: the same, for a program whose clock counts learner steps.
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
        max_learner_steps: int | None = None,
        console: Any = None,
        line_every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        below: Callable[[], Any] | None = None,
    ):
        from rich.console import Console
        from rich.live import Live

        self._limits, self._target = (max_learner_steps, max_env_steps), target_return
        self._console = console or Console()
        self._line_every, self._clock, self._below = line_every, clock, below
        self._seen: collections.deque[tuple[float, Mapping[str, Any]]] = collections.deque()  # Time, counts.
        self._last_line: tuple[float, str] | None = None  # Time and text.
        self._shown: Mapping[str, Any] | None = None
        self._cell: Any = None  # IPython's handle of what a notebook shows.
        # Redrawn at every update, so that no thread is needed.
        self._live = Live(console=self._console, auto_refresh=False)

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        """Shows `{"counts": {name: count}, "labels": {label: newest row}}`.

        None means that there is no new snapshot, as while the program starts; then only `below` is updated.
        """
        if snapshot is not None:
            now = self._clock()
            self._shown = snapshot
            self._seen.append((now, dict(snapshot.get("counts", {}))))
            while len(self._seen) > 2 and self._seen[1][0] <= now - _LONGEST_S:
                self._seen.popleft()
        if self._console.is_jupyter:
            self._show_in_cell()
        elif self._console.is_terminal:
            if snapshot is not None or self._below is not None:
                self._live.start()
                self._live.update(self.render(), refresh=True)
        elif snapshot is not None:
            # The first line is due with the first env steps.
            begun = bool(snapshot.get("counts", {}).get(snapshot.get("clock", ENV_STEPS)))
            if begun if self._last_line is None else now - self._last_line[0] >= self._line_every:
                self._print_line()

    def close(self) -> None:
        """Leaves the last state on the terminal."""
        self._live.stop()
        if self._shown is not None and not (self._console.is_terminal or self._console.is_jupyter):
            self._print_line()
        self._shown = None

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def numbers(self, snapshot: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Returns the texts to show by heading: of `snapshot`, or of the newest that `update` took."""
        snapshot = snapshot or self._shown or {}
        counts, labels = (snapshot.get(name, {}) for name in ("counts", "labels"))
        clock = Clock(snapshot.get("clock", ENV_STEPS))
        steps, limit, rate = clock.now(counts), self._limits[clock.acts], self._rate(clock.count)
        result: dict[str, str] = {}
        for name in dict.fromkeys((clock.count, "learner_steps")):
            if name in counts or name == clock.count:
                end, text = f" / {limit:,}" if limit and name == clock.count else "", name.replace("_", " ")
                growth = self._rate(name, _WINDOW_S if name == ENV_STEPS else _LONGEST_S)
                result[text] = f"{counts.get(name, 0):,}{end}"
                result[f"{text}/s"] = "?" if growth is None else rounded(growth)
        actors = [row for label, row in labels.items() if label.startswith("actor")]
        returns = [row["episode_return"] for row in actors if "episode_return" in row]
        if returns:
            result["return, acting"] = rounded(sum(returns) / len(returns), 1)
        evaluated = labels.get("evaluator", {})
        if "episode_return" in evaluated:
            goal = f" (goal {self._target:g})" if self._target is not None else ""
            at = f" at step {evaluated[clock.count]:,}" if clock.count in evaluated else ""
            result["return, greedy"] = f"{rounded(evaluated['episode_return'], 1)}{goal}{at}"
        learner = labels.get("learner", {})
        for name, value in learner.items():
            if name.startswith("replay") and name.endswith("/samples_per_insert"):
                result["samples per insert"] = rounded(value, 2)
        if "loss" in learner:
            result["loss"] = format_value(learner["loss"])
        result["time to go"] = "?"
        if limit and (rate or steps >= limit):
            seconds = max(0, round((limit - steps) / rate)) if rate else 0
            result["time to go"] = f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
        return result

    def render(self) -> Any:
        """Returns the bar, the table and `below`, for rich."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        parts: list[Any] = []
        clock = Clock((self._shown or {}).get("clock", ENV_STEPS))
        if self._shown is not None and (limit := self._limits[clock.acts]):
            bar = Table.grid()  # On a line of its own.
            bar.add_row(ProgressBar(limit, clock.now(self._shown.get("counts", {})), width=_BAR_WIDTH))
            parts.append(bar)
        if self._shown is not None:
            table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
            table.add_column(style="dim", no_wrap=True)
            table.add_column(no_wrap=True)
            for name, text in self.numbers().items():
                table.add_row(name, printable(text))
            parts.append(table)
        if self._below is not None:
            parts.append(self._below())
        return Group(*parts)

    def _show_in_cell(self) -> None:
        """Shows what a terminal shows in the output of a notebook's cell. Rich's own needs ipywidgets."""
        from IPython.display import display
        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=100, force_jupyter=False)
        console.print(self.render())
        page = '<pre style="line-height: 1.2">{code}</pre>'
        content = {
            "text/plain": console.export_text(clear=False),
            "text/html": console.export_html(inline_styles=True, code_format=page),
        }
        if self._cell is None:
            self._cell = display(content, raw=True, display_id=True)
        else:
            self._cell.update(content, raw=True)

    def _print_line(self) -> None:
        """Prints the numbers, unless the last line has the same."""
        known = [f"{name} {text}" for name, text in self.numbers().items() if text != "?"]
        line = printable(" | ".join(known))
        if self._last_line is None or line != self._last_line[1]:
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)
        self._last_line = (self._clock(), line)

    def _rate(self, name: str, longest: float = _WINDOW_S) -> float | None:
        """Growth of a count per second over about ten seconds; over `longest` if it did not grow."""
        rate = None
        for start, counts in reversed(self._seen):
            end, last = self._seen[-1]
            if end > start:
                rate = (last.get(name, 0) - counts.get(name, 0)) / (end - start)
            if end - start >= (_WINDOW_S if rate else longest):
                break
        return rate
