"""What `repertory sweep` shows while it runs, and its results at the end."""

from __future__ import annotations

import collections
import csv
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from framework.commands import plot
from framework.commands.options import CommandError
from framework.experiments.queue import Running, Tail, newest
from framework.experiments.statistics import stratified_interval
from framework.experiments.sweep import SweepFolder, Variant
from launch.texts import printable, rounded

_SHOWN = 20  # Rows of the live table.
_ORDER = ("running", "failed", "stopped", "finished", "pruned", "waiting")
_CURVES = 8  # Runs of a search whose curves are drawn.
_HEAD = """| agent | settings | environment | runs | return: IQM (95 % CI) | min … max |
|---|---|---|---|---|---|"""


class Display:
    """A live table on a terminal, and a line for each change elsewhere.

    Args:
      folder: of the sweep.
      names: of its runs, as far as they are known.
    """

    def __init__(self, folder: SweepFolder, names: Sequence[str]):
        from rich.live import Live

        self._folder, self._lock = folder, threading.Lock()
        self._states = {name: folder.state(name) for name in names}
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def tell(self, name: str, state: str) -> None:
        """Takes the new state of a run, from any thread."""
        with self._lock:
            self._states[name] = state
            if not self._live.console.is_terminal:
                done = sum(each in ("finished", "pruned", "failed") for each in self._states.values())
                print(f"{_line(self._folder, name, state)}  ({done} of {len(self._states)} done)", flush=True)

    def update(self, running: Sequence[Running]) -> None:
        """Shows what runs now."""
        from rich.text import Text

        if self._live.console.is_terminal:
            with self._lock:
                states = dict(self._states)
            numbers = {each.variant.name: each.newest for each in running}
            self._live.start()
            self._live.update(Text(_as_text(self._folder, states, numbers, _SHOWN)), refresh=True)


def status(folder: SweepFolder) -> str:
    """The text of `repertory sweep status`."""
    states = {name: folder.state(name) for name in folder.names()}
    files = {name: folder.run(name) / "metrics.jsonl" for name in states if states[name] == "running"}
    return _as_text(folder, states, {name: newest(Tail(file).new()) for name, file in files.items()})


def _as_text(
    folder: SweepFolder, states: Mapping[str, str], numbers: Mapping[str, Any], most: int | None = None
) -> str:
    """A line that counts the runs in each state, and a line for each of the first `most` runs."""
    counts, pid = collections.Counter(states.values()), folder.lock.pid()
    where = "not running" if pid is None else f"running as process {pid}"
    begin = ", ".join([where, *(f"{counts[state]} {state}" for state in _ORDER if counts[state])])
    names = sorted(states, key=lambda name: _ORDER.index(states[name]))
    width = max(map(len, names), default=0)
    lines = [_line(folder, name, states[name], numbers.get(name), width) for name in names[:most]]
    more = [f"… and {len(names) - len(lines)} more"] if len(lines) < len(names) else []
    return "\n  ".join([f"{folder.path}: {begin}", *lines, *more])


def _line(folder: SweepFolder, name: str, state: str, numbers: Any = None, width: int = 0) -> str:
    numbers = (folder.outcome(name) if numbers is None else numbers) or {}
    steps, reached = numbers.get("env_steps"), numbers.get("episode_return")
    parts = [f"{name:<{width}}", f"{state:<8}", f"{steps:,} env steps" if steps else ""]
    parts += ["" if reached is None else f"return {rounded(reached, 1)}"]
    parts += [folder.states.get(name, {}).get("error", "") if state == "failed" else ""]
    return printable("  ".join(filter(None, parts)).rstrip())


def report(folder: SweepFolder, variants: Sequence[Variant]) -> None:
    """Writes `table.csv`, a row for each run; `table.md`, a row for each setting; and the curves."""
    outcomes = {each.name: folder.outcome(each.name) or {} for each in variants}
    names = list(dict.fromkeys(name for each in variants for name in each.settings))
    numbers = ("env_steps", "learner_steps", "episode_return")
    with open(folder.path / "table.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "agent", "environment", *names, "seed", "state", *numbers])
        for each in variants:
            settings = [each.settings.get(name) for name in names]
            reached = [outcomes[each.name].get(name) for name in numbers]
            about = [each.name, each.agent, each.environment, *settings, each.seed]
            writer.writerow([*about, folder.state(each.name), *reached])
    returns = {name: of["episode_return"] for name, of in outcomes.items() if "episode_return" in of}
    returns = {name: value for name, value in returns.items() if value is not None}
    text = as_table(variants, returns, folder.sweep.varied)
    (folder.path / "table.md").write_text(f"{text}\n", encoding="utf-8")
    print(printable(text))
    for environment in folder.sweep.environments:
        drawn = [each.name for each in variants if each.environment == environment and each.name in returns]
        if folder.sweep.optuna:
            drawn = sorted(drawn, key=lambda name: -returns[name])[:_CURVES]
        place = re.sub(r"[^\w.-]+", "-", environment.partition(":")[2] or environment)
        paths, picture = [str(folder.run(name)) for name in drawn], folder.path / f"curves-{place}.png"
        try:
            plot.main([*paths, "--band", "iqm", "--output", str(picture)])
        except CommandError as error:  # There are no runs, or they have no evaluations.
            print(f"No curves of {environment}: {error}")


def as_table(variants: Sequence[Variant], returns: Mapping[str, float], varied: Sequence[str]) -> str:
    """Interquartile means over seeds, in Markdown.

    Settings that ran in all of several environments also have a row of all. There, returns are scaled: in
    each environment the lowest of all variants is 0, and the highest is 1.

    Args:
      variants: the runs.
      returns: by the name of a run, its last return.
      varied: the settings to show.
    """
    scores: dict[tuple[str, str], dict[str, np.ndarray]] = {}  # By agent and settings, and environment.
    for each in variants:
        if each.name in returns:
            own = ", ".join(f"{name}={of}" for name, of in each.settings.items() if name in varied)
            places = scores.setdefault((each.agent, own), {})
            places[each.environment] = np.append(places.get(each.environment, []), returns[each.name])
    rows = [(*key, place, [of]) for key, places in scores.items() for place, of in places.items()]
    everywhere = {each.environment for each in variants}
    if len(everywhere) > 1:
        of_all = {e: np.concatenate([places.get(e, []) for places in scores.values()]) for e in everywhere}
        for key, places in scores.items():
            if everywhere == {*places}:
                scaled = [(v - of_all[e].min()) / (np.ptp(of_all[e]) or 1) for e, v in places.items()]
                rows.append((*key, "all, scaled to 0 … 1", scaled))
    lines = [_HEAD]
    for agent, own, place, tasks in rows:
        (middle, low, high), values = stratified_interval(tasks), np.concatenate(tasks)
        interval = f"{middle:.4g} ({low:.4g} … {high:.4g})" if len(values) > 1 else f"{middle:.4g}"
        cells = (agent, own, place, len(values), interval, f"{values.min():.4g} … {values.max():.4g}")
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)
