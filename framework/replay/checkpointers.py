"""Checkpoints of tables and their rows in a directory of their own.

::

    checkpointer = DefaultCheckpointer("/data/replay", keep=2)
    server = Server(tables, checkpointer=checkpointer)      # restores the newest checkpoint, if there is one
    server.localhost_client().checkpoint()                  # writes /data/replay/checkpoint-000000000007

A checkpoint is written beside the others, synced and renamed, so that it is there entirely or not at all;
each file's size and
checksum are in its manifest, and the manifest's own is in ``DONE``. Nothing else in the directory is ever
touched.
Tables go on while rows are written: items are copied under the tables' locks and their rows pinned.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from framework.replay import disk
from framework.replay.errors import CheckpointError, ReverbError, ServerClosed
from framework.replay.rows.store import RowStore
from framework.replay.tables import saving
from framework.replay.tables.table import Table

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint-(\d{12})")
_UNFINISHED = re.compile(r"\.unfinished-checkpoint-(\d{12})-(\d+)")
_BLOCK = 16 << 20  # bytes in one write
_VERSION = 1


class CheckpointerBase(abc.ABC):
    """Saves the tables of a server and restores them."""

    @abc.abstractmethod
    def save(self, tables: dict[str, Table], store: RowStore) -> str:
        """Writes a checkpoint; its path."""

    @abc.abstractmethod
    def load(self, tables: dict[str, Table], store: RowStore) -> str | None:
        """Fills empty tables from the newest checkpoint; its path, or None if there is none."""


class DefaultCheckpointer(CheckpointerBase):
    """See the module.

    Args:
      path: the directory, made if it is not there; may hold other things.
      group: a directory in it for the checkpoints of this server.
      fallback_checkpoint_path: a checkpoint to restore if ``path`` holds none.
      keep: how many checkpoints stay; older ones of this checkpointer are deleted after a newer one is
      complete.
      restore_config: whose sampler, remover, sizes and limiter hold after a restore where they differ,
      ``"constructor"`` or
        ``"checkpoint"`` (as in Reverb). The difference is logged.
      use_previous: whether a truncated or altered checkpoint is passed over for the one before it, with a
      warning. If not, it is a
        ``CheckpointError``.
    """

    def __init__(
        self,
        path: str,
        group: str = "",
        fallback_checkpoint_path: str | None = None,
        keep: int = 1,
        restore_config: str = "constructor",
        use_previous: bool = False,
    ):
        if keep < 1:
            raise ValueError(f"keep: got {keep}, expected at least 1")
        if restore_config not in ("constructor", "checkpoint"):
            raise ValueError(
                f"restore_config: got {restore_config!r}, expected 'constructor' or 'checkpoint'"
            )
        self.path = os.path.join(os.fspath(path), group) if group else os.fspath(path)
        self.fallback_checkpoint_path = fallback_checkpoint_path
        self.keep = keep
        self.restore_config = restore_config
        self.use_previous = use_previous

    def checkpoints(self) -> list[str]:
        """Paths of the complete checkpoints, oldest first."""
        if not os.path.isdir(self.path):
            return []
        names = sorted(name for name in os.listdir(self.path) if _NAME.fullmatch(name))
        return [os.path.join(self.path, name) for name in names]

    def save(self, tables: dict[str, Table], store: RowStore) -> str:
        os.makedirs(self.path, exist_ok=True)
        have = self.checkpoints()
        number = 1 + (int(have[-1].rpartition("-")[2]) if have else 0)
        final = os.path.join(self.path, f"checkpoint-{number:012d}")
        unfinished = os.path.join(self.path, f".unfinished-checkpoint-{number:012d}-{os.getpid()}")
        os.makedirs(unfinished)
        try:
            _write(unfinished, tables, store)
            os.rename(unfinished, final)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        disk.sync(self.path)
        for old in self.checkpoints()[: -self.keep]:
            shutil.rmtree(old)
        self._clean()
        return final

    def _clean(self) -> None:
        """Removes what a writer that died has left."""
        for name in os.listdir(self.path):
            match = _UNFINISHED.fullmatch(name)
            if match and not psutil.pid_exists(int(match.group(2))):
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def load(self, tables: dict[str, Table], store: RowStore) -> str | None:
        paths = self.checkpoints()[::-1]
        if not paths and self.fallback_checkpoint_path is not None:
            paths = [os.fspath(self.fallback_checkpoint_path)]
        for path in paths:
            try:
                manifest = _verify(path)
            except CheckpointError as error:
                if not self.use_previous or path == paths[-1]:
                    raise
                _LOG.warning("%s; the previous one is tried", error)
                continue
            _read(path, manifest, tables, store, self.restore_config == "checkpoint")
            return path
        return None


class TempDirCheckpointer(DefaultCheckpointer):
    """Writes to a new temporary directory, which stays; restores nothing."""

    def __init__(self) -> None:
        super().__init__(tempfile.mkdtemp(prefix="repertory-replay-"))


class PeriodicCheckpoints:
    """Calls ``client.checkpoint()`` every ``interval`` seconds, from a thread of its own, until ``close``.

    ::

        with PeriodicCheckpoints(client, interval=600.0):
            ...

    A checkpoint that fails is logged and kept as ``error``; the next one is tried all the same.
    """

    def __init__(self, client: Any, interval: float):
        if not interval > 0.0:
            raise ValueError(f"interval: got {interval}, expected seconds > 0")
        self.num_written = 0
        self.error: BaseException | None = None
        self._client = client
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay-checkpoints", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                path = self._client.checkpoint()
            except ServerClosed:
                return
            except (OSError, ReverbError) as error:
                self.error = error
                _LOG.exception("a checkpoint of replay was not written")
            else:
                self.num_written += 1
                _LOG.info("wrote %s", path)

    def close(self) -> None:
        """Waits for a checkpoint that is being written, and ends."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> PeriodicCheckpoints:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def default_checkpointer() -> CheckpointerBase:
    """A ``TempDirCheckpointer``."""
    return TempDirCheckpointer()


# Writing.


@contextlib.contextmanager
def _locked(tables: list[Table]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for table in tables:
            table._drain()
        for table in tables:
            stack.enter_context(table._lock)
        yield


def _write(directory: str, tables: dict[str, Table], store: RowStore) -> None:
    ordered = [tables[name] for name in sorted(tables)]
    with _locked(ordered):
        snapshots = [saving.snapshot(table) for table in ordered]
        pinned = []
        for table, (_, arrays) in zip(ordered, snapshots, strict=True):
            for part in saving.live_parts(table, arrays):
                part[0].acquire(part[2])
                pinned.append(part)
    try:
        rows = _rows_of(pinned)
        manifest: dict[str, Any] = {"version": _VERSION, "tables": [], "streams": {}, "files": {}}
        for at, (table, (meta, arrays)) in enumerate(zip(ordered, snapshots, strict=True)):
            _compact(table, arrays, rows)
            meta["arrays"] = {}
            for name, array in arrays.items():
                file = f"table-{at}-{name}"
                meta["arrays"][name] = [file, array.dtype.str, list(array.shape)]
                manifest["files"][file] = _write_blocks(directory, file, iter([array]))
            manifest["tables"].append(meta)
        for at, (name, used) in enumerate(sorted(rows.items())):
            columns = {}
            for which, (column, array) in enumerate(sorted(store.streams[name].columns.items())):
                file = f"stream-{at}-{which}"
                columns[column] = [file, array.dtype.str, list(array.shape[1:])]
                manifest["files"][file] = _write_blocks(directory, file, _blocks(array, used))
            manifest["streams"][name] = {"rows": len(used), "columns": columns}
    finally:
        for binding, _, index in pinned:
            binding.drop(index)
    text = json.dumps(manifest).encode()
    _write_blocks(directory, "manifest.json", iter([np.frombuffer(text, np.uint8)]))
    digest = hashlib.sha256(text).hexdigest().encode()
    _write_blocks(directory, "DONE", iter([np.frombuffer(digest, np.uint8)]))
    disk.sync(directory)


def _rows_of(parts: list[Any]) -> dict[str, np.ndarray]:
    """The rows of each stream that items point at, ascending."""
    found: dict[str, list[np.ndarray]] = {}
    for binding, _, index in parts:
        for stream, begin, end in binding.parts:
            found.setdefault(stream.name, []).append(np.unique(index[:, begin:end]))
    return {name: np.unique(np.concatenate(each)) for name, each in found.items()}


def _compact(table: Table, arrays: dict[str, np.ndarray], rows: dict[str, np.ndarray]) -> None:
    """Makes the index say the place of a row in the file instead of the row."""
    index = np.zeros_like(arrays["index"])
    for binding, slots, lines in saving.live_parts(table, arrays):
        for stream, begin, end in binding.parts:
            index[slots, begin:end] = rows[stream.name].searchsorted(lines[:, begin:end])
    arrays["index"] = index


def _blocks(column: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, _BLOCK // max(1, column[:1].nbytes))
    for begin in range(0, len(rows), step):
        yield column.take(rows[begin : begin + step], 0)


def _write_blocks(directory: str, name: str, blocks: Iterator[np.ndarray]) -> list[int]:
    """Writes and syncs a file; ``[bytes, crc32]``."""
    size = checksum = 0
    with open(os.path.join(directory, name), "wb") as file:
        for block in blocks:
            data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            file.write(data.data)
            checksum = zlib.crc32(data.data, checksum)
            size += data.nbytes
        file.flush()
        os.fsync(file.fileno())
    return [size, checksum]


# Reading.


def _verify(path: str) -> dict[str, Any]:
    """The manifest of a checkpoint whose every byte is as it was written; CheckpointError says what is
    not."""
    try:
        with open(os.path.join(path, "manifest.json"), "rb") as file:
            text = file.read()
        with open(os.path.join(path, "DONE"), "rb") as file:
            digest = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint {path}: it is not complete: {error}") from error
    if hashlib.sha256(text).hexdigest() != digest:
        raise CheckpointError(f"checkpoint {path}: manifest.json was altered or truncated")
    manifest = json.loads(text)
    if manifest["version"] != _VERSION:
        raise CheckpointError(
            f"checkpoint {path}: got format {manifest['version']}, expected {_VERSION}; restore it "
            "with the release "
            "that wrote it"
        )
    for name, (size, checksum) in manifest["files"].items():
        try:
            found = os.path.getsize(os.path.join(path, name))
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: file {name} is missing: {error}") from error
        if found != size:
            raise CheckpointError(f"checkpoint {path}: file {name} has {found} bytes, {size} were written")
        computed = 0
        with open(os.path.join(path, name), "rb") as file:
            while block := file.read(_BLOCK):
                computed = zlib.crc32(block, computed)
        if computed != checksum:
            raise CheckpointError(f"checkpoint {path}: file {name} was altered: its checksum differs")
    return manifest


def _read(
    path: str, manifest: dict[str, Any], tables: dict[str, Table], store: RowStore, from_checkpoint: bool
) -> None:
    saved = {meta["name"]: meta for meta in manifest["tables"]}
    missing = sorted(name for name, meta in saved.items() if name not in tables)
    if missing:
        raise CheckpointError(
            f"checkpoint {path}: it has tables {missing}, the server has {sorted(tables)}; add them "
            "to the server"
        )
    leased = {}
    try:
        for name, stream in manifest["streams"].items():
            leased[name] = _read_stream(path, name, stream, store)
        for name, meta in saved.items():
            arrays = {}
            for array_name, (file, dtype, shape) in meta["arrays"].items():
                array = np.fromfile(os.path.join(path, file), np.dtype(dtype)).reshape(shape)
                arrays[array_name] = array
            saving.restore(tables[name], meta, _expand(meta, arrays, leased), from_checkpoint)
    finally:
        for name, rows in leased.items():
            store.streams[name].release(rows)


def _read_stream(path: str, name: str, saved: dict[str, Any], store: RowStore) -> np.ndarray:
    columns = saved["columns"]
    stream = store.stream(
        name, {c: (tuple(shape), np.dtype(dtype)) for c, (_, dtype, shape) in columns.items()}
    )
    rows = stream.lease(saved["rows"])
    for column, (file_name, dtype, shape) in columns.items():
        array = stream.columns[column]
        step = max(1, _BLOCK // max(1, array[:1].nbytes))
        size = int(np.prod(shape, dtype=np.int64))
        with open(os.path.join(path, file_name), "rb") as file:
            for begin in range(0, len(rows), step):
                at = rows[begin : begin + step]
                block = np.fromfile(file, np.dtype(dtype), len(at) * size)
                array[stream.span(at)] = block.reshape(len(at), *shape)
    return rows


def _expand(
    meta: dict[str, Any], arrays: dict[str, np.ndarray], rows: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The opposite of ``_compact``, into the rows of this store."""
    index = np.zeros_like(arrays["index"])
    for number, (groups, _, _) in enumerate(meta["layouts"]):
        slots = np.flatnonzero((arrays["state"] != 0) & (arrays["layouts"] == number))
        at = 0
        for stream, length, _ in groups:
            if len(slots):
                places = arrays["index"][slots, at : at + length]
                index[slots, at : at + length] = rows[stream][places]
            at += length
    return {**arrays, "index": index}
