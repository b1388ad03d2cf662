"""Reverb's older writer, `client.writer`: an item holds all columns of the last steps.

```python
with client.writer(max_sequence_length=3) as writer:
    for step in steps:
        writer.append(step)
    writer.create_item("replay", num_timesteps=3, priority=1.0)
```

`trajectory_writer` does all of this and more.
"""

from __future__ import annotations

import numpy as np

from framework import nest as nests
from framework.replay import contracts
from framework.replay.reverb_api.trajectory_writer import UNLIMITED, TrajectoryWriter
from framework.types import Nest


class Writer:
    """Writes items of whole steps; see the module docstring. For one thread.

    Args:
      client: any client of `framework.replay`.
      max_sequence_length: largest number of steps in an item; the writer forgets older steps.
      delta_encoded: no effect; rows are stored as they are.
      chunk_length: no effect; in [1, `max_sequence_length`].
      max_in_flight_items: `create_item` waits while more items wait for room in their tables. None means
        1,000,000.
    """

    def __init__(
        self,
        client: contracts.Client,
        max_sequence_length: int,
        delta_encoded: bool = False,
        chunk_length: int | None = None,
        max_in_flight_items: int | None = 25,
    ):
        if max_sequence_length < 1:
            raise ValueError(f"max_sequence_length: got {max_sequence_length}, expected at least 1.")
        if chunk_length is not None and not 1 <= chunk_length <= max_sequence_length:
            raise ValueError(
                f"chunk_length: got {chunk_length}, expected 1 to max_sequence_length {max_sequence_length}."
            )
        in_flight = UNLIMITED if max_in_flight_items is None else max_in_flight_items
        self._longest = max_sequence_length
        self._writer = TrajectoryWriter(client, max_sequence_length, in_flight)
        self._structure: nests.Structure | None = None  # of the first step

    def append(self, data: Nest) -> None:
        """Appends one step. The number of leaves, their shapes and dtypes are those of the first step.

        Items have the nest of the first step.

        Raises:
          ValueError: The step differs from the first one. Nothing is written.
        """
        leaves, structure = nests.flatten(data)
        first = self._structure or structure
        num_leaves = len(nests.paths(first))
        if len(leaves) != num_leaves or any(leaf is None for leaf in leaves):
            raise ValueError(
                f"append: got a step with leaves {nests.paths(structure)}, expected {num_leaves} arrays, no "
                "None, as in the first step."
            )
        self._writer.append(leaves)
        self._structure = first

    def append_sequence(self, sequence: Nest) -> None:
        """Calls `append` for each index of the leading axis `[T, ...]`, which all leaves share."""
        leaves, structure = nests.flatten(sequence)
        shapes = [np.shape(leaf) for leaf in leaves]
        if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
            raise ValueError(
                f"append_sequence: got leaves of shapes {shapes}, expected one leading axis [T, ...] in all."
            )
        for step in zip(*leaves, strict=True):
            self.append(nests.packer(structure)(step))

    def create_item(self, table: str, num_timesteps: int, priority: float) -> int:
        """Creates an item of the last `num_timesteps` steps, leaves `[num_timesteps, ...]`; returns its key.

        The table's signature may describe the item or one step of it.

        Raises:
          ValueError: Fewer steps were appended, the table is unknown, the priority is invalid, or the steps
            do not match the table's signature.
        """
        available = min(self._writer.episode_steps, self._longest)
        if not 1 <= num_timesteps <= available or self._structure is None:
            raise ValueError(
                f"num_timesteps: got {num_timesteps}, expected 1 to {available}: max_sequence_length is "
                f"{self._longest}, {self._writer.episode_steps} steps were appended."
            )
        columns = [column[-num_timesteps:] for column in self._writer.history]
        item = nests.packer(self._structure)(columns)
        return self._writer.create_item(table, priority, item, whole_steps=True)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all items are in their tables; `DeadlineExceededError` after `timeout` seconds."""
        self._writer.flush(timeout=timeout)

    def close(self, retry_on_unavailable: bool = True, timeout: float | None = None) -> int:
        """Flushes for up to `timeout` seconds (not if `retry_on_unavailable` is False) and closes the writer.

        Returns:
          The number of items that were dropped.

        Raises:
          ValueError: The writer was closed before.
        """
        if self._writer.closed:
            raise ValueError("close: the writer is already closed.")
        return self._writer.close(timeout if retry_on_unavailable else 0)

    def __enter__(self) -> Writer:
        if self._writer.closed:
            raise ValueError("The writer is closed. Create a new one.")
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(*error)
