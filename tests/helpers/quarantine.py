"""The tests that may be tried again: lines ``NODE ID | DATE | REASON`` of ``tests/quarantine.txt``."""

from __future__ import annotations

import datetime
import pathlib

PATH = pathlib.Path(__file__).resolve().parent.parent / "quarantine.txt"


def read_quarantine(text: str) -> dict[str, str]:
    """``{node id: reason}``; ValueError for a line that lacks a part or has no ISO date."""
    reasons = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"{PATH.name}: got {line!r}, expected NODE ID | DATE | REASON")
        datetime.date.fromisoformat(parts[1])
        reasons[parts[0]] = parts[2]
    return reasons
