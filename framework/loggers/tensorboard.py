"""Rows as TensorBoard scalars."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from framework.foreign import close
from framework.loggers.base import Logger, to_scalars


class TensorBoardLogger(Logger):
    """Writes the numbers of each row under `label/name`; ignores strings, bools and None.

    The x axis is `env_steps` of a row or else its `steps`. A row without them gets the number of earlier rows
    of its label.

    Args:
      directory: directory of the event files.
    """

    def __init__(self, directory: str | os.PathLike):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(os.fspath(directory))
        self._rows: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writer": pathlib.Path(self._writer.log_dir)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_writer"])  # type: ignore[misc]
        vars(self).update({**state, "_writer": self._writer})

    def write(self, row: Mapping[str, Any]) -> None:
        plain = to_scalars(row)
        label = str(plain.get("label", ""))
        count = self._rows.get(label, 0)
        self._rows[label] = count + 1
        step = next(
            (
                plain[key]
                for key in ("env_steps", "learner_steps", "steps")
                if isinstance(plain.get(key), int)
            ),
            count,
        )
        for name, value in plain.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
                self._writer.add_scalar(f"{label}/{name}" if label else name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        close(self._writer.close, "TensorBoard")
