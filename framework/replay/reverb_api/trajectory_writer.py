"""Reverb's writers of single steps. `TrajectoryWriter` creates items that refer to any of the last steps.

```python
with client.trajectory_writer(num_keep_alive_refs=3) as writer:
    writer.append({"observation": first})
    for action, reward, observation in episode:
        writer.append({"observation": observation, "action": action, "reward": reward})
        if writer.episode_steps >= 3:
            history = writer.history
            item = {"o": history["observation"][-3:], "r": history["reward"][-1]}
            key = writer.create_item("replay", 1.0, item)
    writer.end_episode()
```

A step is one row, whatever the number of items and tables that refer to it. A row lives while an item refers
to it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

import numpy as np

from framework import nest as nests
from framework.replay import contracts
from framework.replay.reverb_api.columns import ColumnHistory, TrajectoryColumn, WrittenStep, WrittenSteps
from framework.replay.writers import MAX_EPISODES
from framework.types import Nest

# `create_item` practically never waits, as in Reverb: this many items may wait for room.
_UNLIMITED = 1_000_000
_STREAM = "steps"


class TrajectoryWriter:
    """Writes steps and items; see the module docstring. For one thread.

    A writer that is garbage-collected without `close` releases its rows.

    Args:
      client: any client of `framework.replay`.
      num_keep_alive_refs: number of the last steps that items may refer to.
      max_in_flight_items: number of items that may wait for room in their tables before `create_item` waits.
    """

    def __init__(
        self, client: contracts.ReplayClient, num_keep_alive_refs: int, max_in_flight_items: int = _UNLIMITED
    ):
        if num_keep_alive_refs < 1:
            raise ValueError(f"num_keep_alive_refs: got {num_keep_alive_refs}, expected at least 1.")
        self._writer = client.batch_writer(max_in_flight_items)
        #: Whether `close` was called.
        self.closed = False
        #: Number of closed steps of this episode.
        self.episode_steps = 0
        self._keep = self._longest = num_keep_alive_refs
        self._steps = WrittenSteps()
        self._open_step: WrittenStep | None = None
        self._episode = _new_episode()
        self._columns: dict[str, ColumnHistory] = {}
        self._history: Nest = None  # the nest of all steps together
        # The columns of each structure that was appended, by the structure's representation.
        self._columns_of: dict[str, dict[str, ColumnHistory]] = {}
        self._packs: dict[str, nests.Pack] = {}  # rebuilds the nest of an item, by the same

    @property
    def step_is_open(self) -> bool:
        """Whether the last `append` was a partial step."""
        return self._open_step is not None

    @property
    def history(self) -> Nest:
        """The nest of the steps with a `ColumnHistory` at each leaf; `RuntimeError` before a step."""
        if self._history is None:
            raise RuntimeError("history: got no step yet. Call append() first.")
        return self._history

    def configure(
        self, path: str | Sequence[str | int], num_keep_alive_refs: int, max_chunk_length: int | None = None
    ) -> None:
        """Sets for how many steps the column at `path`, `"a/b"` or `("a", "b")`, is kept from now on.

        `max_chunk_length` has no effect: rows are stored one by one, without chunks.

        Raises:
          ValueError: `1 <= max_chunk_length <= num_keep_alive_refs` does not hold.
        """
        name = path if isinstance(path, str) else "/".join(map(str, path)) or nests.ROOT
        if num_keep_alive_refs < 1:
            raise ValueError(f"num_keep_alive_refs: got {num_keep_alive_refs}, expected at least 1.")
        if max_chunk_length is not None and not 1 <= max_chunk_length <= num_keep_alive_refs:
            most = f"num_keep_alive_refs {num_keep_alive_refs}"
            raise ValueError(f"max_chunk_length: got {max_chunk_length}, expected 1 to {most}.")
        self._column(name).keep = num_keep_alive_refs
        self._longest = max(self._longest, num_keep_alive_refs)

    def append(self, data: Nest, *, partial_step: bool = False) -> None:
        """Appends a step, or a part of it.

        Args:
          data: nest of arrays and numbers; None at a leaf means that the step has no data there. Dicts, lists
            and tuples may have more leaves than before.
          partial_step: whether the step stays open, so that the next `append` continues it. All columns count
            an open step.

        Raises:
          ValueError: A dtype, a shape or the structure changed, or a column is in the step twice. Nothing is
            written.
          StoreFullError: There is no room for the step. Nothing is written.
        """
        leaves, structure = nests.flatten(data)
        kind = repr(structure)
        columns, history = self._columns_of.get(kind), self._history
        if columns is None:
            paths = nests.paths(structure)
            if len(set(paths)) < len(paths):
                raise ValueError(f"append: got leaves {paths}, expected different paths. Rename keys.")
            columns = {path: self._column(path) for path in paths}
            history = _merge(history, nests.packer(structure)(list(columns.values())))
        step = self._open_step or WrittenStep(self._episode)
        given = zip(columns, leaves, strict=True)
        arrays = {path: np.array(value) for path, value in given if value is not None}
        twice = sorted(arrays.keys() & step.data.keys())
        if twice:
            raise ValueError(f"append: got column {twice[0]!r} twice in one step, expected each column once.")
        if arrays:
            rows = None if step.row is None else np.array([step.row])
            batch = {path: array[None] for path, array in arrays.items()}
            step.row = int(self._writer.append(_STREAM, batch, rows)[0])
            step.data.update(arrays)
        # Nothing below this line fails.
        self._history, self._columns_of[kind] = history, columns
        if self._open_step is None:
            self._steps.kept[self._steps.length] = step
            self._steps.length += 1
            forgotten = self._steps.kept.pop(self._steps.length - self._longest - 1, None)
            if forgotten is not None:
                self._release([forgotten])
        self._open_step = step if partial_step else None
        self.episode_steps += not partial_step

    def _column(self, path: str) -> ColumnHistory:
        return self._columns.setdefault(path, ColumnHistory(path, self._keep, self._steps))

    def _release(self, steps: Sequence[WrittenStep]) -> None:
        rows = [step.row for step in steps if step.row is not None]
        for step in steps:
            step.row = None
        if rows:
            self._writer.release(_STREAM, np.array(rows, np.int64))

    def create_item(self, table: str, priority: float, trajectory: Nest, *, whole_steps: bool = False) -> int:
        """Creates an item of `table` that refers to parts of the history.

        Args:
          table: name of the table.
          priority: a finite number >= 0.
          trajectory: nest with `history[...][...]` at its leaves, which may differ in length.
          whole_steps: whether the table's signature may describe one step of the item.

        Returns:
          The item's key.

        Raises:
          TypeError: A leaf is not a part of a history.
          ValueError: A leaf refers to steps that are no longer kept or to another writer's steps, the table
            is unknown, or the trajectory does not match its signature.
        """
        leaves, structure = nests.flatten(trajectory)
        rows_of: dict[tuple[tuple[WrittenStep, ...], bool], np.ndarray] = {}
        slices = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, TrajectoryColumn):
                raise TypeError(
                    f"trajectory, leaf {nests.paths(structure)[number]!r}: got {type(leaf).__name__}, "
                    "expected a part of a history, history[...][-n:]."
                )
            key = (leaf.steps, leaf.is_squeezed)
            if key not in rows_of:  # leaves with one array of rows share their row numbers in the item
                rows_of[key] = self._rows(leaf)
            part = self._writer.slice(_STREAM, leaf.path, rows_of[key])
            part.step = whole_steps
            slices.append(part)
        kind = repr(structure)
        if kind not in self._packs:
            self._packs[kind] = nests.packer(structure)
        ids = {step.episode for steps, _ in rows_of for step in (*steps[:1], *steps[-1:])}
        if len(ids) > 1:  # and those between
            ids = {step.episode for steps, _ in rows_of for step in steps}
        episodes = np.array([sorted(ids)[-MAX_EPISODES:]], np.uint64)
        return int(self._writer.create_items(table, self._packs[kind](slices), [priority], episodes)[0])

    def _rows(self, leaf: TrajectoryColumn) -> np.ndarray:
        rows = [step.row for step in leaf.steps]
        if leaf.source is not self._steps or None in rows:
            what = "steps of another writer" if leaf.source is not self._steps else "a step no longer kept"
            raise ValueError(
                f"trajectory, {leaf!r}: got {what}, expected steps of this writer's history that are still "
                f"kept. Increase num_keep_alive_refs, {self._keep} now, to keep more steps."
            )
        return np.array(rows if leaf.is_squeezed else [rows], np.int64)

    def flush(
        self, block_until_num_items: int = 0, timeout_ms: int | None = None, timeout: float | None = None
    ) -> None:
        """Waits until at most `block_until_num_items` items are not in their tables.

        Raises:
          DeadlineExceededError: More items wait after `timeout` seconds (or `timeout_ms` milliseconds). They
            stay in the queue.
        """
        if block_until_num_items < 0:
            raise ValueError(f"block_until_num_items: got {block_until_num_items}, expected at least 0.")
        self._writer.flush(_seconds(timeout_ms, timeout), keep=block_until_num_items)

    def end_episode(
        self, clear_buffers: bool = True, timeout_ms: int | None = None, timeout: float | None = None
    ) -> None:
        """Flushes, closes an open step and starts a new episode, even if the flush fails.

        Args:
          clear_buffers: whether to forget the history; if not, later items may refer to earlier episodes.
          timeout_ms: as in `flush`.
          timeout: as in `flush`.
        """
        try:
            self.flush(0, timeout_ms, timeout)
        finally:
            self._open_step = None
            self._episode = _new_episode()
            self.episode_steps = 0
            if clear_buffers:
                forgotten, self._steps.kept, self._steps.length = self._steps.kept, {}, 0
                self._release(list(forgotten.values()))

    def close(self, timeout: float | None = None) -> int:
        """Flushes for up to `timeout` seconds and closes the writer; returns the number of dropped items."""
        self.closed = True
        return self._writer.close(timeout)

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None and not self.closed:
                self.flush()
        finally:
            self.close(timeout=0)  # after an error, do not wait for a rate limiter


class Writer:
    """Reverb's older writer, `client.writer`: an item holds all columns of the last steps. For one thread.

    ```python
    with client.writer(max_sequence_length=3) as writer:
        for step in steps:
            writer.append(step)
        writer.create_item("replay", num_timesteps=3, priority=1.0)
    ```

    `TrajectoryWriter` does all of this and more.

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
        client: contracts.ReplayClient,
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
        in_flight = _UNLIMITED if max_in_flight_items is None else max_in_flight_items
        self._longest = max_sequence_length
        self._writer = TrajectoryWriter(client, max_sequence_length, in_flight)
        self._structure: nests.Structure | None = None  # of the first step

    def append(self, data: Nest) -> None:
        """Appends one step. The number of leaves, their shapes and dtypes are the first step's.

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


def _new_episode() -> int:
    return secrets.randbits(63) | 1


def _seconds(timeout_ms: int | None, timeout: float | None) -> float | None:
    if timeout_ms is not None and timeout is not None:
        raise ValueError(f"timeout: got timeout_ms={timeout_ms} and timeout={timeout}, expected one of them.")
    return timeout if timeout_ms is None else timeout_ms / 1000.0


def _merge(old: Nest, new: Nest, where: str = "") -> Nest:
    """Returns the nest with the leaves of both: dicts, lists and tuples may grow, leaves stay leaves."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _merge(old.get(key), new.get(key), f"{where}/{key}") for key in [*old, *new]}
    if isinstance(old, (list, tuple)) and type(old) is type(new):
        pairs = itertools.zip_longest(old, new)
        children = [_merge(a, b, f"{where}/{at}") for at, (a, b) in enumerate(pairs)]
        return type(old)(*children) if hasattr(old, "_fields") else type(old)(children)
    if old != new:
        got, kept = ["leaf" if isinstance(x, ColumnHistory) else type(x).__name__ for x in (new, old)]
        raise ValueError(
            f"append: got a {got} at {where or 'the root'}, expected a {kept} as in earlier steps."
        )
    return old
