"""Reverb's ``TrajectoryWriter``: steps in, items that point at any of the last steps out.

::

    with client.trajectory_writer(num_keep_alive_refs=3) as writer:
        writer.append({"observation": first})
        for action, reward, observation in episode:
            writer.append({"observation": observation, "action": action, "reward": reward})
            if writer.episode_steps >= 3:
                history = writer.history
                key = writer.create_item("replay", 1.0, {"o": history["observation"][-3:], "r":
                history["reward"][-1]})
        writer.end_episode()

A step is one row, whatever number of items and tables point at it; a row lives on while an item does.
"""

from __future__ import annotations

import secrets
import zlib
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.errors import ServerClosed
from framework.replay.reverb_api.columns import ColumnHistory, Describer, TrajectoryColumn
from framework.types import Nest


class TrajectoryWriter:
    """See the module. For one thread.

    Args:
      client: any client of ``framework.replay``.
      num_keep_alive_refs: how many of the last steps items may point at.
      validate_items: kept for Reverb's signature; items are always checked.
    """

    def __init__(self, client: Any, num_keep_alive_refs: int, validate_items: bool = True):
        if num_keep_alive_refs < 1:
            raise ValueError(f"num_keep_alive_refs: got {num_keep_alive_refs}, expected at least 1")
        if not validate_items:
            raise ValueError("validate_items: got False; items are always checked here, leave it out")
        self._writer = client.batch_writer()
        self._keep = self._longest = num_keep_alive_refs
        self._keeps: dict[str, int] = {}  # set by configure
        self._stream = ""
        self._columns: dict[str, ColumnHistory] = {}
        self._structure: Nest = None  # the merged structure of all steps; leaves are paths
        self._history: Nest = None
        self._data: dict[int, dict[str, np.ndarray]] = {}
        self._describe = Describer()
        self._merged: set[int] = set()  # shapes that _structure covers; the describer keeps them
        self._steps = 0  # closed since the last reset of the history
        self._episode_steps = 0
        self._episode = secrets.randbits(63) | 1
        self._open: np.ndarray | None = None  # the row of the open step
        self._rows: dict[int, int] = {}  # step -> row, until released
        self._closed = False

    @property
    def episode_steps(self) -> int:
        """Closed steps of this episode."""
        return self._episode_steps

    @property
    def history(self) -> Nest:
        """The nest of the steps with a ``ColumnHistory`` at each leaf; RuntimeError before the first step."""
        if self._structure is None:
            raise RuntimeError("history: nothing was appended yet")
        if self._history is None:
            paths, structure = nests.flatten(self._structure)
            self._history = nests.packer(structure)([self._columns.get(path) for path in paths])
        return self._history

    def configure(
        self, path: str | tuple, num_keep_alive_refs: int, max_chunk_length: int | None = None
    ) -> None:
        """How long the column at ``path`` (``"a/b"`` or ``("a", "b")``) is kept, from now on.

        ``max_chunk_length`` is kept for Reverb's signature: rows are stored one by one, there are no chunks.

        Raises:
          ValueError: not ``1 <= max_chunk_length <= num_keep_alive_refs``.
        """
        name = path if isinstance(path, str) else "/".join(str(part) for part in path)
        if num_keep_alive_refs < 1:
            raise ValueError(f"num_keep_alive_refs: got {num_keep_alive_refs}, expected at least 1")
        if max_chunk_length is not None and not 1 <= max_chunk_length <= num_keep_alive_refs:
            raise ValueError(
                f"max_chunk_length: got {max_chunk_length}, expected 1 to num_keep_alive_refs "
                f"{num_keep_alive_refs}"
            )
        if name in self._columns:
            self._columns[name].keep = num_keep_alive_refs
        self._keeps[name] = num_keep_alive_refs
        self._longest = max(self._longest, num_keep_alive_refs)

    def append(self, step: Nest, partial_step: bool = False) -> Nest:
        """Appends a step, or a part of it; None at a leaf means that the step has nothing there.

        Args:
          step: nest of arrays and numbers; may have more leaves than the steps before.
          partial_step: the step stays open and the next ``append`` goes on with it.

        Returns:
          The nest with a ``TrajectoryColumn`` of this step at each leaf.

        Raises:
          ValueError: a dtype or shape changed, or a column is in the step twice; nothing was written.
        """
        self._check_open()
        leaves, shape = self._describe(step)
        paths = shape.paths
        arrays: dict[str, np.ndarray] = {}
        for path, value in zip(paths, leaves, strict=True):
            if value is None:
                continue
            array = np.asarray(value)
            column = self._columns.get(path)
            if column is not None:
                if column.has(self._steps):
                    raise ValueError(
                        f"append: column {path!r} is in this step already; a step has each column once"
                    )
                step_shape, dtype = column.spec
                if array.dtype != dtype:
                    raise ValueError(
                        f"append: column {path!r}: got dtype {array.dtype}, expected {dtype} as before"
                    )
                if array.shape != step_shape:
                    raise ValueError(
                        f"append: column {path!r}: got shape {array.shape}, expected {step_shape} as before"
                    )
            elif array.dtype.hasobject:
                raise ValueError(
                    f"append: column {path!r}: got {type(value).__name__}, expected an array or a number"
                )
            arrays[path] = array
        seen = id(shape) in self._merged
        merged = self._structure if seen else _merge(self._structure, shape.pack(paths), "")
        if not arrays and not (partial_step or self._open is not None):
            raise ValueError("append: got a step without data, expected at least one leaf that is not None")
        if arrays:
            self._write(arrays)
        if not seen:
            self._structure, self._history = merged, None
            self._merged.add(id(shape))
        references = shape.pack([self._columns[path].last() if path in arrays else None for path in paths])
        if not partial_step:
            self._close_step()
        return references

    def _write(self, arrays: dict[str, np.ndarray]) -> None:
        if not self._stream:
            # Writers of equal steps share a stream; others must not collide in it.
            kind = repr(sorted((path, a.dtype.str, a.shape) for path, a in arrays.items()))
            self._stream = f"trajectory-{zlib.crc32(kind.encode()):08x}"
        columns = {path: array[None] for path, array in arrays.items()}
        if self._open is None:
            self._open = self._writer.append(self._stream, columns)
            self._rows[self._steps] = int(self._open[0])
        else:
            self._writer.append(self._stream, columns, self._open)
        row = int(self._open[0])
        self._data.setdefault(row, {}).update({path: array.copy() for path, array in arrays.items()})
        for path, array in arrays.items():
            column = self._columns.get(path)
            if column is None:
                keep = self._keeps.get(path, self._keep)
                column = self._columns[path] = ColumnHistory(self._stream, path, path, keep, self._read)
                column.spec = (array.shape, array.dtype)
                self._history = None
            column.put(self._steps, row)

    def _read(self, column: str, rows: np.ndarray) -> np.ndarray:
        try:
            return np.stack([self._data[row][column] for row in rows.tolist()])
        except KeyError:
            raise ValueError(
                f"column {column!r}: the data is no longer kept; use it before it expires"
            ) from None

    def _close_step(self) -> None:
        self._open = None
        self._steps += 1
        self._episode_steps += 1
        for column in self._columns.values():
            column.close(self._steps)
        oldest = self._steps - self._longest
        if next(iter(self._rows)) < oldest:
            self._release([step for step in self._rows if step < oldest])

    def _release(self, steps: list[int]) -> None:
        if steps:
            rows = [self._rows.pop(step) for step in steps]
            for row in rows:
                self._data.pop(row, None)
            self._writer.release(self._stream, np.array(rows, np.int64))

    def create_item(self, table: str, priority: float, trajectory: Nest) -> int:
        """An item of ``table`` that points at parts of the history. It never waits.

        Args:
          table: name.
          priority: finite, >= 0.
          trajectory: nest with ``history[...][...]`` at its leaves, each with a length of its own.

        Returns:
          The item's key.

        Raises:
          ValueError: a leaf is no column or has expired, or the trajectory does not match the table's
          signature.
        """
        self._check_open()
        leaves, shape = self._describe(trajectory)
        rows_of: dict[tuple[tuple[int, ...], bool], np.ndarray] = {}
        slices = []
        for path, leaf in zip(shape.paths, leaves, strict=True):
            if isinstance(leaf, ColumnHistory):
                raise ValueError(
                    f"trajectory, leaf {path!r}: got a whole history, expected a part: history[...][-n:]"
                )
            if not isinstance(leaf, TrajectoryColumn):
                raise ValueError(
                    f"trajectory, leaf {path!r}: got {type(leaf).__name__}, expected history[...][...]"
                )
            key = (leaf.rows, leaf.squeeze)
            rows = rows_of.get(key)
            if rows is None:
                for row in leaf.rows:
                    if row not in self._data:
                        raise ValueError(
                            f"trajectory, leaf {path!r}: a step that it refers to is no longer kept; "
                            "num_keep_alive_refs "
                            f"is {self._keep}"
                        )
                rows = np.array(leaf.rows if leaf.squeeze else [leaf.rows], np.int64)
                rows_of[key] = rows
            slices.append(self._writer.slice(leaf.stream, leaf.column, rows))
        episodes = np.array([self._episode], np.uint64)
        priorities = np.array([priority], np.float64)
        keys = self._writer.create_items(table, shape.pack(slices), priorities, episodes)
        return int(keys[0])

    def flush(
        self, block_until_num_items: int = 0, timeout_ms: int | None = None, timeout: float | None = None
    ) -> None:
        """Waits until at most ``block_until_num_items`` items are not in their tables.

        Raises:
          DeadlineExceededError: after ``timeout`` seconds (or ``timeout_ms``); the items stay and go in
          later.
        """
        self._check_open()
        if block_until_num_items < 0:
            raise ValueError(f"block_until_num_items: got {block_until_num_items}, expected at least 0")
        timeout = _seconds(timeout_ms, timeout)
        self._writer.flush(timeout, keep=block_until_num_items)

    def end_episode(
        self, clear_buffers: bool = True, timeout_ms: int | None = None, timeout: float | None = None
    ) -> None:
        """Flushes and begins a new episode, whatever comes of the flush.

        Args:
          clear_buffers: forget the history; otherwise later items may point across the boundary.
        """
        self._check_open()
        try:
            self.flush(0, timeout_ms, timeout)
        finally:
            if self._open is not None:
                self._close_step()
            self._episode = secrets.randbits(63) | 1
            self._episode_steps = 0
            if clear_buffers:
                self._release(list(self._rows))
                self._steps = 0
                for path, column in list(self._columns.items()):
                    fresh = ColumnHistory(column.stream, path, path, column.keep, self._read)
                    fresh.spec = column.spec
                    self._columns[path] = fresh
                self._history = None

    def close(self, timeout: float | None = None) -> int:
        """Flushes for up to ``timeout`` seconds and ends the writer; how many items were dropped."""
        if self._closed:
            return 0
        self._closed = True
        self._data.clear()
        return self._writer.close(timeout)

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        # After an error nobody waits for a limiter.
        self.close(timeout=None if kind is None else 0)

    def _check_open(self) -> None:
        if self._closed:
            raise ServerClosed("the writer was closed")


def _seconds(timeout_ms: int | None, timeout: float | None) -> float | None:
    if timeout_ms is not None and timeout is not None:
        raise ValueError(f"got timeout_ms={timeout_ms} and timeout={timeout}, expected one of them")
    return timeout if timeout_ms is None else timeout_ms / 1000.0


def _merge(old: Nest, new: Nest, where: str) -> Nest:
    """The structure with the leaves of both; dicts may grow, everything else must stay as it is."""
    if old is None:
        return new
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *[key for key in new if key not in old]]
        return {
            key: _merge(old.get(key), new.get(key), f"{where}/{key}") if key in new else old[key]
            for key in keys
        }
    if isinstance(old, (list, tuple)) and type(old) is type(new):
        if hasattr(old, "_fields"):
            return type(old)(*[_merge(a, b, where) for a, b in zip(old, new, strict=True)])
        if len(new) >= len(old):
            longer = [_merge(a, b, where) for a, b in zip(old, new, strict=True)] + list(new[len(old) :])
            return type(old)(longer)
        return type(old)([*[_merge(a, b, where) for a, b in zip(old, new, strict=True)], *old[len(new) :]])
    if old != new:
        raise ValueError(
            f"append: the structure changed at {where or 'its root'}: got {new!r}, it was {old!r}"
        )
    return old
