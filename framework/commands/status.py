"""`repertory status`: the state of a run, read from its folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from framework import interrupts
from framework.clock import Clock
from framework.commands.curves import kept_rows
from framework.commands.options import Run, parse
from framework.loggers import ProgressDisplay
from framework.runs.run_folder import RunFolder
from launch.texts import printable, rounded
from launch.view import NodesView

_ALIVE = ("starting", "running", "restarting", "closing", "stopping")  # States that need a launcher.
_RATES = ("env steps/s", "learner steps/s", "time to go")  # A folder does not tell these.


@dataclass(frozen=True)
class StatusOptions:
    """Shows whether a run is running, its nodes and its newest numbers."""

    run: Run  # Folder of the run.
    watch: bool = False  # Show the table of nodes, every second, until the run ends.


def main(arguments: Sequence[str]) -> int:
    options = parse(StatusOptions, arguments, prog="repertory status")
    folder = RunFolder.open(options.run)
    if options.watch:
        interrupts.clean_up_first()
        watch(folder)
    else:
        print(printable(text(folder)))
    return 0


def watch(folder: RunFolder, console: Any = None, interval: float = 1.0) -> None:
    """Shows the table of nodes until the run ends or Ctrl-C; leaves the last table on the terminal.

    Args:
      folder: folder of the run.
      console: a `rich.console.Console`; None means standard output.
      interval: seconds between two updates.
    """
    from rich.live import Live

    end = threading.Thread(target=folder.lock.wait_until_free, args=(None,), daemon=True)
    if folder.lock.pid() is not None:
        end.start()
    view = NodesView(lambda: _status(folder), interval=0.0)
    with Live(view(), console=console, auto_refresh=False) as live:
        try:
            while end.is_alive():
                end.join(interval)
                live.update(view(), refresh=True)
        except KeyboardInterrupt:
            return


def text(folder: RunFolder) -> str:
    """Returns the output of `repertory status`: at most a screen, with the numbers that `train` shows."""
    pid = folder.lock.pid()
    state = f"running as process {pid}" if pid is not None else "not running"
    lines = [f"{folder.path}: {folder.agent} in {folder.environment_name}, {state}"]
    labels: dict[str, dict[str, Any]] = {}
    counts: dict[str, Any] = {}
    for row in kept_rows(folder):
        labels.setdefault(str(row.get("label", "")), {}).update(
            {name: value for name, value in row.items() if value is not None}
        )
    if "learner" in labels:
        counts["learner_steps"] = labels["learner"].get("steps", 0)
    acting = [row["env_steps"] for row in labels.values() if "env_steps" in row]
    clock = Clock() if acting or not counts else Clock("learner_steps")  # Rows tell which it was.
    if clock.acts:
        counts["env_steps"] = max(acting, default=0)
    limits = folder.config.max_env_steps, folder.config.target_return, folder.config.max_learner_steps
    numbers = ProgressDisplay(*limits).numbers({"counts": counts, "labels": labels, "clock": clock.count})
    lines += [f"  {name:<20}{value}" for name, value in numbers.items() if name not in _RATES]
    latest = folder.checkpointer.latest()
    lines += [f"  {'newest checkpoint':<20}{latest.name if latest else 'none yet'}"]
    lines += [_node(node) for node in _status(folder).get("nodes", [])]
    return "\n".join([*lines, f"All metrics are in {folder.metrics}."])


def _status(folder: RunFolder) -> dict[str, Any]:
    """Returns the engine's last status, corrected if the engine was killed before it could write the end."""
    try:
        status: dict[str, Any] = json.loads((folder.path / "status.json").read_text(encoding="utf-8"))
    except (
        FileNotFoundError,
        ValueError,
        RecursionError,
    ):  # Some engines do not write it; it may be damaged.
        return {}
    nodes = status.get("nodes", []) if isinstance(status, dict) else None
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        return {}
    if folder.lock.pid() is None:
        for each in (status, *status.get("nodes", [])):
            if each.get("state") in _ALIVE:
                each["state"] = "killed"
    return status


def _node(node: dict[str, Any]) -> str:
    shown = {
        "pid": "pid {}",
        "cpu_seconds": "cpu {} s",
        "memory_mb": "memory {} MB",
        "restarts": "restarts {}",
        "error": "error {}",
    }
    used = {"cpu_seconds": node.get("cpu_seconds") or 0.0, "memory_mb": (node.get("memory_bytes") or 0) / 1e6}
    node = {**node, **{name: value and rounded(value) for name, value in used.items()}}
    details = ", ".join(text.format(node[name]) for name, text in shown.items() if node.get(name))
    return f"  {node.get('label')}: {node.get('state')}{f' ({details})' if details else ''}"
