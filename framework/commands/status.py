"""`repertory status`: the state of a run, read from its folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from framework.commands.options import parse
from framework.loggers.base import format_value
from framework.loggers.jsonl import read_jsonl
from framework.programs.run_folder import RunFolder
from launch.view import NodesView

_ALIVE = ("starting", "running", "restarting", "closing", "stopping")  # states that need a launcher


@dataclass(frozen=True)
class StatusOptions:
    """Shows whether a run is running, its nodes and its newest numbers."""

    run: tyro.conf.Positional[str]  # Folder of the run.
    watch: bool = False  # Show the table of nodes, every second, until the run ends.


def main(arguments: Sequence[str]) -> int:
    options = parse(StatusOptions, arguments, prog="repertory status")
    folder = RunFolder.open(options.run)
    if options.watch:
        watch(folder)
    else:
        print(text(folder))
    return 0


def watch(folder: RunFolder, console: Any = None, interval: float = 1.0) -> None:
    """Shows the table of nodes until the run ends or Ctrl-C; leaves the last table on the terminal.

    Args:
      folder: folder of the run.
      console: a `rich.console.Console`; None means standard output.
      interval: seconds between two updates.
    """
    from rich.live import Live

    end = threading.Thread(target=folder.wait_until_free, args=(None,), daemon=True)
    if folder.running_pid() is not None:
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
    """Returns the output of `repertory status`."""
    pid = folder.running_pid()
    state = f"running as process {pid}" if pid is not None else "not running"
    lines = [f"{folder.path}: {folder.agent} in {folder.environment_name}, {state}"]
    lines += [_node(node) for node in _status(folder).get("nodes", [])]
    newest: dict[str, dict[str, Any]] = {}
    if folder.metrics.exists():
        for row in read_jsonl(folder.metrics):
            newest.setdefault(str(row.pop("label", "")), {}).update(row)
    for label, row in newest.items():
        lines += [f"{label}:"]
        lines += [f"  {name} = {format_value(value)}" for name, value in row.items()]
    latest = folder.checkpointer.latest()
    lines += [f"newest checkpoint: {latest.name if latest else 'none yet'}"]
    return "\n".join(lines)


def _status(folder: RunFolder) -> dict[str, Any]:
    """Returns the engine's last status, corrected if the engine was killed before it could write the end."""
    try:
        status: dict[str, Any] = json.loads((folder.path / "status.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):  # not every engine writes it; it may be incomplete
        return {}
    if folder.running_pid() is None:
        for each in (status, *status.get("nodes", [])):
            if each.get("state") in _ALIVE:
                each["state"] = "killed"
    return status


def _node(node: dict[str, Any]) -> str:
    shown = ("pid", "cpu_seconds", "memory_bytes", "restarts", "error")
    details = ", ".join(f"{name} {format_value(node[name])}" for name in shown if node.get(name))
    return f"  {node.get('label')}: {node.get('state')}{f' ({details})' if details else ''}"
