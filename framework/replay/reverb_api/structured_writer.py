"""Reverb's ``StructuredWriter``: steps in, and items come out by themselves where patterns say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.reverb_api.columns import ColumnHistory
from framework.replay.reverb_api.structured import Config, Moment
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter
from framework.types import Nest


class StructuredWriter:
    """After each complete step every config whose steps are all there and whose conditions hold makes an
    item.

    Configs with ``Condition.is_end_episode()`` are looked at in ``end_episode`` only, the others after steps
    only.

    Args:
      client: any client of ``framework.replay``.
      configs: from ``structured.create_config``.
    """

    def __init__(self, client: Any, configs: Sequence[Config]):
        if not configs:
            raise ValueError("configs: got none, expected at least one structured.create_config(...)")
        self._configs = list(configs)
        self._patterns = [nests.flatten(config.pattern) for config in configs]
        self._writer = TrajectoryWriter(client, max(config.lookback for config in configs))
        self._since = [0] * len(self._configs)
        self._columns: dict[str, ColumnHistory] = {}

    @property
    def step_is_open(self) -> bool:
        """Whether the last ``append`` was a partial step."""
        return self._writer._open is not None

    def append(self, step: Nest, partial_step: bool = False) -> None:
        """Appends a step, or a part of it; None at a leaf means that the step has nothing there."""
        self._writer.append(step, partial_step)
        paths, columns = (nests.flatten(nest) for nest in (self._writer._structure, self._writer.history))
        self._columns = {
            path: column for path, column in zip(paths[0], columns[0], strict=True) if column is not None
        }
        if partial_step:
            return
        self._since = [since + 1 for since in self._since]
        self._apply(at_end=False)

    def _apply(self, at_end: bool) -> None:
        steps = self._writer.episode_steps
        for number, config in enumerate(self._configs):
            if (
                any(condition.at_end for condition in config.conditions) is not at_end
                or steps < config.lookback
            ):
                continue
            moment = Moment(steps - 1, self._since[number], at_end, lambda path: self._read(path, 1)[0])
            if not all(condition.test(moment) for condition in config.conditions):
                continue
            leaves, structure = self._patterns[number]
            if not all(self._has(leaf) for leaf in leaves):
                continue
            trajectory = nests.packer(structure)([self._columns[leaf.path][leaf.index] for leaf in leaves])
            priority = config.priority(self._read, config.lookback)
            self._writer.create_item(config.table, priority, trajectory)
            self._since[number] = 0

    def _has(self, leaf: Any) -> bool:
        """Whether the column is in every step that the pattern selects."""
        column = self._columns.get(leaf.path)
        if column is None:
            raise ValueError(f"pattern: got leaf {leaf.path!r}, the steps have {sorted(self._columns)}")
        last = len(column)
        return all(
            column.has(last + at)
            for at in range(leaf.start, leaf.stop or 0, leaf.step or 1)[: leaf.length or 1]
        )

    def _read(self, path: str, steps: int) -> np.ndarray:
        if path not in self._columns:
            raise ValueError(f"got leaf {path!r}, the steps have {sorted(self._columns)}")
        return self._columns[path][-steps:].numpy()

    def flush(
        self, block_until_num_items: int = 0, timeout_ms: int | None = None, timeout: float | None = None
    ) -> None:
        """See ``TrajectoryWriter.flush``."""
        self._writer.flush(block_until_num_items, timeout_ms, timeout)

    def end_episode(
        self, clear_buffers: bool = True, timeout_ms: int | None = None, timeout: float | None = None
    ) -> None:
        """Applies the configs that wait for the end, flushes, and begins a new episode."""
        try:
            if self._writer.episode_steps:
                self._apply(at_end=True)
        finally:
            self._since = [0] * len(self._configs)
            self._writer.end_episode(clear_buffers, timeout_ms, timeout)

    def close(self, timeout: float | None = None) -> int:
        """See ``TrajectoryWriter.close``."""
        return self._writer.close(timeout)

    def __enter__(self) -> StructuredWriter:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._writer.__exit__(kind, error, traceback)
