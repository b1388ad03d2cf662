"""One JSON object per line: columns may appear at any time, and an incomplete last line affects no other."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from framework.loggers.base import Logger, Row, Scalar, to_scalars
from framework.loggers.files import AppendFile

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JSONLLogger(Logger):
    """Appends rows to `path`; every row reaches the operating system before `write` returns.

    NaN and infinities become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, so that every line is valid
    JSON; `read_jsonl` converts them back.

    Args:
      path: the file; its folder is created. An existing file is continued.
    """

    def __init__(self, path: str | os.PathLike):
        self._file = AppendFile(path)

    def write(self, row: Mapping[str, Any]) -> None:
        plain = {name: _to_json(value) for name, value in to_scalars(row).items()}
        self._file.append(json.dumps(plain, allow_nan=False, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | os.PathLike) -> Iterator[Row]:
    """Yields the rows of a file. Skips invalid lines with a warning that gives the line number."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                warnings.warn(f"{path}:{number}: left out a line that is not JSON ({error}).")
                continue
            yield {name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
                   for name, value in row.items()}  # fmt: skip


def _to_json(value: Scalar) -> Scalar:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
