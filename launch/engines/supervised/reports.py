"""The files of a run for its users: logs and `status.json`."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from typing import Any

_TAIL_LINES = 20
_TAIL_BYTES = 16384


def log_path(directory: str, label: str) -> str:
    """Returns the path of a node's log."""
    return os.path.join(directory, "logs", f"{label}.log")


def append_log(directory: str | None, label: str, data: bytes) -> None:
    """Appends the output of a node on another machine to its log."""
    if directory is not None:
        with open(log_path(directory, label), "ab") as file:
            file.write(data)


def log_tail(directory: str | None, label: str) -> str:
    """Returns the last lines of a node's log; empty if there is none."""
    if directory is None:
        return ""
    try:
        with open(log_path(directory, label), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])


def write_status(directory: str | None, status: dict[str, Any]) -> None:
    """Replaces `status.json` atomically, so that a reader never sees a part of it."""
    if directory is None:
        return
    path = os.path.join(directory, "status.json")
    temporary = f"{path}.{secrets.token_hex(4)}"
    with open(temporary, "w") as file:
        json.dump({**status, "time": time.time(), "launcher_pid": os.getpid()}, file, indent=1)
    os.replace(temporary, path)


def describe_exit(code: int) -> str:
    """Describes an exit code in words; negative codes are signals."""
    if code >= 0:
        return f"The process exited with code {code} before the program was over."
    return f"The process was killed by {signal.Signals(-code).name}."
