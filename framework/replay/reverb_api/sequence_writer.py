"""Reverb's older writer, ``client.writer``: items are the last so many steps, all columns of them.

::

    with client.writer(max_sequence_length=3) as writer:
        for step in steps:
            writer.append(step)
        writer.create_item("replay", num_timesteps=3, priority=1.0)

``trajectory_writer`` does all of this and more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from framework.replay.reverb_api.columns import ColumnHistory
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter
from framework.types import Nest

# What None stands for: a bound all the same, since what is in flight takes memory.
_UNLIMITED = 1 << 16


class Writer:
    """See the module. For one thread.

    Args:
      client: any client of ``framework.replay``.
      max_sequence_length: the most steps of an item; older steps are forgotten.
      delta_encoded: kept for Reverb's signature; without effect, rows are stored as they are.
      chunk_length: likewise, in [1, ``max_sequence_length``].
      max_in_flight_items: ``create_item`` waits until at most so many items are not in their tables. None
        for 65,536.
    """

    def __init__(
        self,
        client: Any,
        max_sequence_length: int,
        delta_encoded: bool = False,
        chunk_length: int | None = None,
        max_in_flight_items: int | None = 25,
    ):
        if max_sequence_length < 1:
            raise ValueError(f"max_sequence_length: got {max_sequence_length}, expected at least 1")
        if chunk_length is not None and not 1 <= chunk_length <= max_sequence_length:
            raise ValueError(
                f"chunk_length: got {chunk_length}, expected 1 to max_sequence_length {max_sequence_length}"
            )
        if max_in_flight_items is not None and max_in_flight_items < 1:
            raise ValueError(f"max_in_flight_items: got {max_in_flight_items}, expected at least 1 or None")
        self._longest = max_sequence_length
        self._in_flight = max_in_flight_items or _UNLIMITED
        self._writer = TrajectoryWriter(client, max_sequence_length)
        self._closed = False

    def append(self, data: Nest) -> None:
        """One step: a nest of the same structure, shapes and dtypes each time.

        Raises:
          ValueError: it is not like the steps before; nothing was written.
        """
        self._writer.append(data)

    def append_sequence(self, sequence: Nest) -> None:
        """``append`` for each index of the leading axis ``[T, ...]``, which all leaves share."""
        leaves = [np.asarray(leaf) for leaf in tree.flatten(sequence)]
        lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
        if len(lengths) != 1 or None in lengths:
            raise ValueError(
                f"append_sequence: got leaves of shapes {[leaf.shape for leaf in leaves]}, expected one "
                "leading axis [T, ...] in all of them"
            )
        for step in range(lengths.pop() or 0):
            self.append(tree.unflatten_as(sequence, [leaf[step] for leaf in leaves]))

    def create_item(self, table: str, num_timesteps: int, priority: float) -> int:
        """An item of the last ``num_timesteps`` steps, leaves ``[num_timesteps, ...]``; its key.

        Raises:
          ValueError: there are not so many steps, the table is unknown or the priority is not valid.
        """
        available = min(self._writer.episode_steps, self._longest)
        if not 1 <= num_timesteps <= available:
            raise ValueError(
                f"num_timesteps: got {num_timesteps}, expected 1 to {available}: max_sequence_length is "
                f"{self._longest}, {self._writer.episode_steps} steps were appended"
            )
        trajectory = tree.map_structure(
            lambda column: column[-num_timesteps:] if isinstance(column, ColumnHistory) else column,
            self._writer.history,
        )
        key = self._writer.create_item(table, priority, trajectory)
        self._writer.flush(self._in_flight)
        return key

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all items are in their tables; DeadlineExceededError after ``timeout`` seconds."""
        self._writer.flush(timeout=timeout)

    def close(self, retry_on_unavailable: bool = True, timeout: float | None = None) -> int:
        """Flushes for up to ``timeout`` seconds (not at all if not ``retry_on_unavailable``) and ends the
        writer; how many items were dropped. ValueError if it was closed before."""
        if self._closed:
            raise ValueError("close: this writer is closed already")
        self._closed = True
        return self._writer.close(timeout if retry_on_unavailable else 0)

    def __enter__(self) -> Writer:
        if self._closed:
            raise ValueError("this writer is closed; make another")
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self._closed:
            self.close(timeout=None if kind is None else 0)  # after an error nobody waits for a limiter
