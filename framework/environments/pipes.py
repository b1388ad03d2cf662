"""The protocol between `ProcessEnvironment` and its children, and their shared arrays.

A socket pair carries one byte per command and answer. Observations, rewards and actions are in memory that
both processes map. The memory has no name, so no file remains, whichever process dies first.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import socket
import struct
import tempfile
from typing import Any

import numpy as np
import tree

from framework import specs
from framework.environments.base import Buffers

# Parent to child.
RESET, STEP, STEP_ENVS, RENDER, CLOSE = b"r", b"s", b"l", b"v", b"c"
# Child to parent. FAILED and DATA are followed by a message.
DONE, FAILED, DATA = b"k", b"e", b"d"

# The env to render.
INDEX = struct.Struct("!I")
_LENGTH = struct.Struct("!Q")
_ALIGNMENT = 64


def send_message(connection: socket.socket, message: Any, tag: bytes = DATA) -> None:
    """Sends a tag and a picklable message."""
    import cloudpickle

    payload = cloudpickle.dumps(message)
    connection.sendall(tag + _LENGTH.pack(len(payload)) + payload)


def receive_message(connection: socket.socket) -> Any:
    """The message that follows a tag that was read already; EOFError if the other side is gone."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    return pickle.loads(receive_exactly(connection, length))


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)


class Arena:
    """Hands out arrays one after the other from a file's memory; None for the file only counts bytes."""

    def __init__(self, descriptor: int | None, size: int = 0):
        self._memory = None if descriptor is None else mmap.mmap(descriptor, size)
        self.used = 0

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The next array; the same calls in the same order give both processes the same memory."""
        dtype = np.dtype(dtype)
        start = self.used
        size = math.prod(shape) * dtype.itemsize
        self.used += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None:
            return np.zeros((0, *shape[1:]), dtype)
        return np.ndarray(shape, dtype, buffer=self._memory, offset=start)


class SharedArrays:
    """The actions and masks of all B envs, in memory that the parent and its children map."""

    def __init__(self, spec: specs.EnvironmentSpec, num_envs: int, arena: Arena):
        self.actions = [
            arena.allocate((num_envs, *leaf.shape), leaf.dtype) for leaf in tree.flatten(spec.actions)
        ]
        self.active = arena.allocate((num_envs,), np.bool_)
        self.ended = arena.allocate((num_envs,), np.bool_)


def shared_size(spec: specs.EnvironmentSpec, num_envs: int) -> int:
    """How many bytes `SharedArrays` and `Buffers` take."""
    arena = Arena(None)
    SharedArrays(spec, num_envs, arena)
    Buffers(spec, num_envs, arena.allocate)
    return max(arena.used, 1)


def make_memory(size: int) -> int:
    """A descriptor of `size` bytes of memory without a name; OSError if there is not enough."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("repertory-environments")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):
            # Reserved now: running out of memory later would kill the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
