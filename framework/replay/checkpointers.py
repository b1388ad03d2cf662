"""Checkpoints of tables and their rows, each in its own directory.

```python
checkpointer = DefaultCheckpointer("/data/replay", keep=2)
server = Server(tables, checkpointer=checkpointer)      # restores the newest checkpoint, if there is one
server.localhost_client().checkpoint()                  # writes /data/replay/checkpoint-000007
```

`framework.checkpoints` writes and verifies the folders. Tables stay in use while rows are written: items are
copied under the tables' locks, and their rows are pinned until the checkpoint is written.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from framework.checkpoints import Checkpointer, CheckpointReader, Part
from framework.replay.errors import CheckpointError
from framework.replay.rows.store import RowStore, span
from framework.replay.tables.saved_items import SavedPart, options_of, restore_table, save_table
from framework.replay.tables.table import Table

_LOG = logging.getLogger(__name__)
_DIFFERENT = "table %r, %s: the checkpoint has %s, the constructor %s; the constructor's is used"
_BLOCK = 16 << 20  # bytes in one write


class CheckpointerBase(abc.ABC):
    """Saves the tables of a server and restores them."""

    @abc.abstractmethod
    def save(self, tables: dict[str, Table], store: RowStore) -> str:
        """Writes a checkpoint and returns its path."""

    @abc.abstractmethod
    def load(self, tables: dict[str, Table], store: RowStore) -> str | None:
        """Fills empty tables from the newest checkpoint; returns its path, or None if there is none."""


class DefaultCheckpointer(CheckpointerBase):
    """Keeps the newest checkpoints of a directory.

    Args:
      path: the directory; created if it does not exist. It may hold other files.
      group: name of a directory in `path` for the checkpoints of this server.
      fallback_checkpoint_path: a checkpoint to restore if `path` holds none.
      keep: number of checkpoints to keep; older ones of this checkpointer are deleted after a newer one is
        complete.
      use_previous: whether to restore the previous checkpoint, with a warning, if the newest is damaged. If
        False, a damaged one raises `CheckpointError`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: str = "",
        fallback_checkpoint_path: str | os.PathLike[str] | None = None,
        keep: int = 1,
        use_previous: bool = False,
    ):
        self.path = os.path.join(os.fspath(path), group)
        self.fallback_checkpoint_path = fallback_checkpoint_path
        self.use_previous = use_previous
        self._checkpointer = Checkpointer(self.path, keep)

    def checkpoints(self) -> list[str]:
        """Returns the paths of the complete checkpoints, oldest first."""
        return [os.fspath(path) for path in self._checkpointer.checkpoints()]

    def save(self, tables: dict[str, Table], store: RowStore) -> str:
        ordered = [tables[name] for name in sorted(tables)]
        for table in ordered:
            table.drain()
        with contextlib.ExitStack() as locked:
            for table in ordered:
                locked.enter_context(table.lock)
            saved = [save_table(table) for table in ordered]
            pinned = [(binding, index) for _, _, parts in saved for binding, _, index in parts]
            for binding, index in pinned:
                binding.acquire(index)
        try:
            files, note = _files(saved, store)
            return os.fspath(self._checkpointer.save(None, files, note))
        finally:
            for binding, index in pinned:
                binding.release(index)

    def load(self, tables: dict[str, Table], store: RowStore) -> str | None:
        if self.checkpoints():
            newest = self._checkpointer.newest_intact if self.use_previous else self._checkpointer.restore
            reader = newest()
        elif self.fallback_checkpoint_path is not None:
            reader = self._checkpointer.restore(Path(self.fallback_checkpoint_path).absolute())
        else:
            return None
        assert reader is not None
        path, note = reader.path, reader.manifest["note"]
        if "tables" not in note:
            raise CheckpointError(f"checkpoint {path}: got no tables, expected a folder that replay wrote.")
        saved = {meta["name"]: meta for meta in note["tables"]}
        missing = sorted(name for name in saved if name not in tables)
        if missing:
            raise CheckpointError(
                f"checkpoint {path}: got tables {missing}, expected tables of the server, {sorted(tables)}. "
                "Add them to the server."
            )
        leased = {}
        try:
            for name, stream in note["streams"].items():
                leased[name] = _read_stream(reader, name, stream, store)
            for name, meta in saved.items():
                with np.load(reader.part(meta["file"])) as file:
                    arrays = dict(file)
                own = options_of(tables[name])
                for option, value in meta["config"].items():
                    if own[option] != value:
                        _LOG.warning(_DIFFERENT, name, option, value, own[option])
                restore_table(tables[name], meta, arrays, leased)
        finally:
            for name, rows in leased.items():
                store.streams[name].release(rows)
        return os.fspath(path)


class TempDirCheckpointer(DefaultCheckpointer):
    """Writes to a new temporary directory, which is not deleted; restores nothing."""

    def __init__(self) -> None:
        super().__init__(tempfile.mkdtemp(prefix="repertory-replay-"))


default_checkpointer = TempDirCheckpointer


# Writing.

_Saved = list[tuple[dict[str, Any], dict[str, np.ndarray], list[SavedPart]]]


def _files(saved: _Saved, store: RowStore) -> tuple[dict[str, Part], dict[str, Any]]:
    """Returns the files of a checkpoint, read when they are written, and their entry in the manifest."""
    files: dict[str, Part] = {}
    note: dict[str, Any] = {"tables": [], "streams": {}}
    used: dict[str, np.ndarray] = {}  # the rows of each stream that items refer to, ascending
    for _, _, parts in saved:
        for binding, _, index in parts:
            for stream, begin, end in binding.parts:
                rows = index[:, begin:end].ravel()
                used[stream.name] = np.union1d(used.get(stream.name, rows), rows)
    for at, (meta, arrays, parts) in enumerate(saved):
        # Each row number in the index becomes the row's place in the file.
        arrays["index"][:] = 0
        for binding, slots, index in parts:
            for stream, begin, end in binding.parts:
                arrays["index"][slots, begin:end] = used[stream.name].searchsorted(index[:, begin:end])
        meta["file"] = f"table-{at}.npz"
        files[meta["file"]] = functools.partial(np.savez, **arrays)  # type: ignore[arg-type]
        note["tables"].append(meta)
    for at, (name, rows) in enumerate(sorted(used.items())):
        columns: dict[str, list[Any]] = {}
        for which, (column, array) in enumerate(sorted(store.streams[name].columns.items())):
            file = f"stream-{at}-{which}"
            columns[column] = [file, array.dtype.str, list(array.shape[1:])]
            files[file] = _blocks(array, rows)
        note["streams"][name] = {"rows": len(rows), "columns": columns}
    return files, note


def _blocks(column: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the rows of a column."""
    step = _block_rows(column)
    for begin in range(0, len(rows), step):
        yield column.take(rows[begin : begin + step], 0).reshape(-1).view(np.uint8)


def _block_rows(column: np.ndarray) -> int:
    # A compressed column has the bytes of its rows uncompressed.
    return max(1, _BLOCK // max(1, math.prod(column.shape[1:]) * column.dtype.itemsize))


# Reading.


def _read_stream(
    reader: CheckpointReader, name: str, saved: Mapping[str, Any], store: RowStore
) -> np.ndarray:
    columns = saved["columns"]
    stream = store.stream(name, {c: (shape, dtype) for c, (_, dtype, shape) in columns.items()})
    rows = stream.lease(saved["rows"])
    for column, (file_name, dtype, shape) in columns.items():
        array = stream.columns[column]
        step = _block_rows(array)
        size = int(np.prod(shape, dtype=np.int64))
        with open(reader.part(file_name), "rb") as file:
            for begin in range(0, len(rows), step):
                at = rows[begin : begin + step]
                block = np.fromfile(file, np.dtype(dtype), len(at) * size)
                array[span(at)] = block.reshape(len(at), *shape)
    return rows
