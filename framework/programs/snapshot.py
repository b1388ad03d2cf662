"""The exact state of a program on the serial engine, so that an interrupted run continues bit for bit.

A program on the serial engine is a graph of objects in one process, and between two turns nothing runs. Its
state is therefore one pickle of all nodes' objects: replay, networks, optimizers, random generators, open
episodes, environments. No class has to know about it. The exceptions are what is tied to the process (locks,
clients, the run's settings), and arrays that share memory, which a plain pickle would separate.

An interrupted run stores the pickle in its last checkpoint, as the part `program`. It resumes from the pickle
if it runs on the serial engine with the same versions and settings. Otherwise it resumes from the other parts
of the checkpoint, as on every engine: with the same parameters and replay, and new episodes.
"""

from __future__ import annotations

import copyreg
import hashlib
import hmac
import io
import json
import logging
import os
import pickle
import random
import secrets
import socket
import threading
import types
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import launch
from framework.checkpoints import package_versions
from framework.environments.states import StatePickler
from framework.programs.run_config import RunConfig
from framework.programs.services import PROGRAM, newest_checkpoint
from framework.replay.local.client import EmbeddedClient
from framework.replay.rows.store import Allocator, Stream
from framework.variables import VariableBlock
from launch import context
from launch.engines.in_process import LocalRuntime, Place
from launch.program import ProgramState

if TYPE_CHECKING:
    from framework.programs.run_folder import RunFolder

_LOG = logging.getLogger(__name__)
_LIMITS = ("max_env_steps", "max_learner_steps", "target_return")  # May differ when a run resumes.
_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class Snapshot:
    """Saves and loads the state of a run's program; see `launch.Program.snapshot`.

    Args:
      run: the run's folder.
      on_write: the argument of the new `Monitor`.
    """

    def __init__(self, run: RunFolder, on_write: Any = None):
        self._run, self._config, self._on_write = run, run.config, on_write

    def save(self, state: ProgramState) -> None:
        """Adds the state to the checkpoint that the run writes when it closes.

        A part that cannot be pickled (an environment in another process, a compiled loss) is logged. The run
        then resumes with new episodes.
        """
        import torch

        file = io.BytesIO()
        generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            torch.save((generators, state), file, pickle_module=_pickle_module())
        except Exception as error:
            _LOG.warning(
                "The exact state of the run was not saved, so a resumed run begins new episodes: %s: %s",
                type(error).__name__,
                error,
            )
            return
        about = json.dumps(self._about()).encode()
        data = about + b"\n" + file.getvalue()
        state.objects["checkpointer-0"].put_bytes(PROGRAM, _signature(data) + data)

    def load(self) -> ProgramState | None:
        """The state in the newest checkpoint; None if the run does not continue from one."""
        reader = newest_checkpoint(self._config)
        if reader is None or PROGRAM not in reader.names:
            return None
        content = reader.part(PROGRAM).read_bytes()
        signature, data = content[:64], content[64:]
        if not hmac.compare_digest(signature, _signature(data)):
            _LOG.warning("The exact state was saved by another user or machine, so new episodes begin.")
            return None
        about, _, pickled = data.partition(b"\n")
        if json.loads(about) != self._about():
            _LOG.warning("The run's settings or packages have changed, so new episodes begin.")
            return None
        import torch

        _current.config = self._config
        generators, state = torch.load(
            io.BytesIO(pickled), pickle_module=_pickle_module(), weights_only=False
        )
        state.objects["counter-0"].max_steps = self._config.max_env_steps
        state.objects["monitor-0"].on_write = self._on_write
        self._run.record("serial")
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        return state

    def _about(self) -> dict[str, Any]:
        """What has to be equal when the run resumes."""
        config = {key: value for key, value in vars(self._config).items() if key not in _LIMITS}
        return {"versions": package_versions(), "config": config}


class _Current(threading.local):
    """What objects refer to that belongs to the new program."""

    config: RunConfig


_current = _Current()


class _Pickler(StatePickler):
    """See the module. An array that shares memory is pickled with the array that owns the memory."""

    def __init__(self, file: io.BytesIO, protocol: int | None = None):
        super().__init__(file, protocol)
        self._num_rows: dict[int, int] = {}  # By the id of a column: rows that were ever used.

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _LOCKS:
            return _LOCKS[kind], ()
        if kind in (weakref.ref, weakref.WeakMethod) and obj() is not None:
            return kind, (obj(),)
        if kind is weakref.finalize:
            return _nothing, ()  # The object's memory is this process's, and ends with it.
        if kind is socket.socket:
            return socket.socket, (obj.family, obj.type)  # Nothing waits at its other end.
        if kind is LocalRuntime:
            return context.current_runtime, ()
        if kind is Place:
            return _place, (obj.label,)
        if kind is RunConfig:
            return _config, ()
        if isinstance(obj, threading.Event) and obj is launch.stop_event():
            return launch.stop_event, ()
        if kind in (
            EmbeddedClient,
            VariableBlock,
            launch.Client,
        ):  # Whose reductions are for other processes.
            return copyreg.__newobj__, (kind,), vars(obj)  # type: ignore[attr-defined]
        if kind is Stream:
            self._num_rows.update((id(array), obj.num_leased) for array in obj.arrays())
        if kind is np.ndarray and obj.base is not None:
            return self._reduce_view(obj)
        return super().reducer_override(obj)

    def _reduce_view(self, array: np.ndarray) -> Any:
        if id(array) in self._num_rows:  # Of virtual memory, of which few rows are used.
            return _column, (array.shape, array.dtype, array[: self._num_rows[id(array)]].copy())
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if owner is not array:
            offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
            return np.ndarray, (array.shape, array.dtype, owner, offset, array.strides)
        if type(owner.base).__module__ == "torch":
            return _array_of, (owner.base,)
        return NotImplemented


def _place(label: str) -> Place:
    runtime = context.current_runtime()
    assert isinstance(runtime, LocalRuntime)
    return next(place for place in runtime.places.values() if place.label == label)


def _config() -> RunConfig:
    return _current.config


def _nothing() -> None:
    return None


def _column(shape: tuple[int, ...], dtype: np.dtype, rows: np.ndarray) -> np.ndarray:
    column = Allocator().allocate("", "", shape, dtype)
    column[: len(rows)] = rows
    return column


def _array_of(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.numpy()
    return array


def _pickle_module() -> types.ModuleType:
    """What `torch.save` and `torch.load` take: they add the storages of tensors, shared or not."""
    module = types.ModuleType("snapshot_pickle")
    vars(module).update(Pickler=_Pickler, Unpickler=pickle.Unpickler, load=pickle.load)
    return module


def _signature(data: bytes) -> bytes:
    """64 bytes that only this user on this machine can compute: a pickle can run code when it is loaded."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "repertory"
    path = folder / "snapshot-key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secrets.token_bytes(32))
    return hmac.new(path.read_bytes(), data, hashlib.sha256).hexdigest().encode()
