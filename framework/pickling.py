"""Pickles live objects between two of their calls: adders, tables with their rows, environments.

No class needs code for this. The exceptions are locks, weak references, and arrays that share memory, which a
plain pickle would separate.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import queue
import threading
import types
import weakref
from typing import Any

import numpy as np

from framework.environments.states import StatePickler
from framework.replay.client import EmbeddedClient
from framework.replay.rows.store import Allocator, Stream

_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class ObjectPickler(StatePickler):
    """See the module. An array that shares memory is pickled with the array that owns the memory."""

    def __init__(self, file: io.BytesIO, protocol: int | None = None):
        super().__init__(file, protocol)
        self._num_rows: dict[int, int] = {}  # By the id of a column: rows that were ever used.

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _LOCKS:
            return _LOCKS[kind], ()
        if kind is weakref.ref and obj() is not None:
            return weakref.ref, (obj(),)
        if kind is weakref.WeakMethod and obj() is not None:
            return weakref.WeakMethod, (obj(),)
        if kind is weakref.finalize:
            return _nothing, ()  # The object's memory is this process's, and ends with it.
        if kind is queue.SimpleQueue:
            items = [obj.get() for _ in range(obj.qsize())]
            _put_all(obj, items)
            return kind, (), items, None, None, _put_all
        if kind is EmbeddedClient:  # The class's own reduction is for other processes.
            return copyreg.__newobj__, (kind,), vars(obj)  # type: ignore[attr-defined]
        if kind is Stream:
            self._num_rows.update((id(array), obj.num_leased) for array in obj.arrays())
        if kind is np.ndarray and obj.base is not None:
            return self._reduce_view(obj)
        return super().reducer_override(obj)

    def _reduce_view(self, array: np.ndarray) -> Any:
        if id(array) in self._num_rows:  # It is virtual memory, of which few rows are used.
            return _column, (array.shape, array.dtype, array[: self._num_rows[id(array)]].copy())
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if owner is not array:
            if not owner.flags.forc:  # Such as a tensor that was expanded.
                return np.ascontiguousarray, (array.copy(),)
            offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
            return _view, (owner, array.shape, array.dtype, offset, array.strides)
        if type(owner.base).__module__ == "torch":
            return _array_of, (owner.base,)
        return NotImplemented


def pickle_module(pickler: type[ObjectPickler]) -> types.ModuleType:
    """What `torch.save` and `torch.load` take: they add the storages of tensors, shared or not."""
    module = types.ModuleType("object_pickle")
    vars(module).update(Pickler=pickler, Unpickler=pickle.Unpickler, load=pickle.load)
    return module


def _nothing() -> None:
    return None


def _put_all(into: queue.SimpleQueue, items: list[Any]) -> None:
    for item in items:
        into.put(item)


def _column(shape: tuple[int, ...], dtype: np.dtype, rows: np.ndarray) -> np.ndarray:
    column = Allocator().allocate("", "", shape, dtype)
    column[: len(rows)] = rows
    return column


def _view(owner: np.ndarray, shape: Any, dtype: np.dtype, offset: int, strides: Any) -> np.ndarray:
    memory = owner if owner.flags.c_contiguous else owner.T
    return np.ndarray(shape, dtype, memory, offset, strides)


def _array_of(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.numpy()
    return array
