"""``repertory status``: how a run is getting on, read from its folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from agents.commands import flags
from agents.commands.run_folder import RunFolder
from framework.loggers.base import format_value
from framework.loggers.jsonl import read_jsonl


@dataclass(frozen=True)
class StatusOptions:
    """Shows whether a run is running, its nodes and its newest numbers."""

    run: tyro.conf.Positional[str]  # Folder of the run.
    watch: bool = False  # Show the nodes, again every second, until the run ends.


def main(arguments: Sequence[str]) -> int:
    options = flags.parse(StatusOptions, arguments, prog="repertory status")
    folder = RunFolder.open(options.run)
    if options.watch:
        watch(folder)
    else:
        print(text(folder))
    return 0


def watch(folder: RunFolder, console: Any = None, interval: float = 1.0) -> None:
    """Shows the table of nodes until the run ends or Ctrl-C; the last one stays.

    Args:
      folder: of the run.
      console: a ``rich.console.Console``; None is standard output.
      interval: seconds between two looks at the run.
    """
    from rich.live import Live

    end = threading.Thread(target=folder.wait_until_free, args=(None,), daemon=True)
    if folder.running_pid() is not None:
        end.start()
    before: Mapping[str, Any] = {}
    now = _status(folder)
    with Live(nodes_table(now, before), console=console, auto_refresh=False) as live:
        try:
            while end.is_alive():
                end.join(interval)
                newest = _status(folder)
                if newest and newest.get("time") != now.get("time"):
                    before, now = now, newest
                live.update(nodes_table(now, before), refresh=True)
        except KeyboardInterrupt:
            return


def nodes_table(status: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
    """A ``rich`` table of the nodes in two readings of ``status.json``, from whose difference the rates come.

    CPU is in percent of one core, memory what is resident, calls what the node was asked by others.
    """
    from rich.table import Table
    from rich.text import Text

    title = (
        f"{status.get('program', 'no program')} on {status.get('engine', '?')}: {status.get('state', '?')}"
    )
    table = Table(title=title)
    table.add_column("node")
    table.add_column("state")
    for column in ("restarts", "CPU %", "memory MB", "calls/s"):
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
        style = {"failed": "red", "killed": "red", "restarting": "yellow"}.get(node.get("state", ""), "")
        state = Text(str(node.get("state")), style=style)
        table.add_row(Text(str(node["label"])), state, *cells, Text(str(node.get("error") or "")))
    return table


def _rate(node: Mapping[str, Any], old: Mapping[str, Any], name: str, seconds: float, factor: float) -> str:
    """What ``name`` grew by in a second; nothing if that is not known, as after a restart."""
    now, then = node.get(name), old.get(name)
    if now is None or then is None or seconds <= 0 or node.get("pid") != old.get("pid"):
        return ""
    return f"{max(0.0, now - then) / seconds * factor:,.0f}"


def text(folder: RunFolder) -> str:
    """What ``repertory status`` prints."""
    pid = folder.running_pid()
    state = f"running as process {pid}" if pid is not None else "not running"
    lines = [f"{folder.path}: {folder.agent} in {folder.options.environment}, {state}"]
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
    try:
        return json.loads((folder.path / "status.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):  # not every engine writes it; it may be half written
        return {}


def _node(node: dict[str, Any]) -> str:
    shown = ("pid", "cpu_seconds", "memory_bytes", "restarts", "error")
    details = ", ".join(f"{name} {format_value(node[name])}" for name in shown if node.get(name))
    return f"  {node.get('label')}: {node.get('state')}{f' ({details})' if details else ''}"
