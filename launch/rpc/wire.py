"""Messages between nodes: one small head, a pickle, and large arrays as frames of their own.

A message is a frame ``head | pickle`` followed by ``buffers`` frames that hold the memory of large arrays
(pickle protocol 5, out of band), which are never copied on their way into the socket of a waiting caller
nor out of it at the other end. Nothing here looks at a message before its sender has shown the program's
key: that is done by the sockets (`launch.rpc.sockets`).
"""

from __future__ import annotations

import pickle
import struct
import time
import traceback
from collections.abc import Sequence
from typing import Any

import zmq

# kind of message, number of buffers that follow, number of the call within its connection
HEAD = struct.Struct("<BxHxxxxQ")
CALL, REPLY, ERROR, PROBE, PENDING, LOST = range(1, 7)
# Arrays below this many bytes are cheaper inside the pickle than as a frame.
IN_BAND_BYTES = 1 << 14
_MAX_BUFFERS = 0xFFFF
_PAUSES = (0.0, 0.01, 0.1)  # seconds, after which a pickle that could not be loaded is tried again
_MAIN = b"__main__"
_HEAD_BYTES = HEAD.size
_unpack = HEAD.unpack_from
_pack = HEAD.pack
_loads = pickle.loads
_dumps = pickle.dumps


class MalformedMessage(ValueError):
    """A message that no node of ours would send."""


class Lost(Exception):
    """The node does not know a call that it was asked: it was restarted in between."""


def encode(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """The pickle of ``value`` and the large buffers that it leaves out."""
    buffers: list[pickle.PickleBuffer] = []

    def keep_out(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < IN_BAND_BYTES or len(buffers) >= _MAX_BUFFERS:
            return True
        buffers.append(buffer)
        return False

    try:
        data = _dumps(value, 5, buffer_callback=keep_out)
        if _MAIN not in data:
            return data, buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        pass  # lambdas, local classes: cloudpickle can, and its error is the better one if it cannot
    # What is defined in __main__ is another module over there: it has to travel by value.
    import cloudpickle

    buffers.clear()
    return cloudpickle.dumps(value, 5, buffer_callback=keep_out), buffers


def decode(body: memoryview, buffers: Sequence[Any]) -> Any:
    """The value of a received message; its large arrays use the memory of the frames."""
    return load(body[_HEAD_BYTES:], buffers)


def load(data: Any, buffers: Sequence[Any]) -> Any:
    """The value of a pickle without a head."""
    for pause in _PAUSES:
        try:
            return _loads(data, buffers=buffers)
        except (ImportError, AttributeError, RuntimeError):
            # Threads that import parts of one package at the same time can find each other's modules half
            # made, or want each other's locks. By now this thread holds none: the others may go on.
            time.sleep(pause)
    return _loads(data, buffers=buffers)  # what is missing stays missing


def receive(socket: zmq.Socket, flags: int = 0) -> tuple[int, int, memoryview, Sequence[Any]]:
    """``(kind, call number, body, buffers)`` of the next message (behind the identity, on a ROUTER).

    Raises:
      MalformedMessage: the frames do not fit the head; the whole message has been taken off the socket.
      zmq.Again: nothing came within the socket's receive timeout.
    """
    frame = socket.recv(flags, copy=False)
    body = frame.buffer
    if len(body) < _HEAD_BYTES:
        drain(socket, frame)
        raise MalformedMessage(f"a message of {len(body)} bytes")
    kind, count, number = _unpack(body)
    if not (count or frame.more):
        return kind, number, body, ()
    buffers: list[Any] = []
    while len(buffers) < count and frame.more:
        frame = socket.recv(copy=False)
        buffers.append(frame.buffer)
    if len(buffers) < count or frame.more:
        drain(socket, frame)
        raise MalformedMessage(f"a message of kind {kind} with other buffers than its head says ({count})")
    return kind, number, body, buffers


def drain(socket: zmq.Socket, frame: zmq.Frame) -> None:
    """Takes what follows ``frame`` in its message off the socket."""
    while frame.more:
        frame = socket.recv(copy=False)


def head(kind: int, number: int, buffers: int = 0) -> bytes:
    return _pack(kind, buffers, number)


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: its kind, message, traceback, and its pickle where it has one."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    pickled: bytes | None = None
    try:
        import cloudpickle

        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)  # exceptions whose __init__ wants more than ``args`` fail only here
    except Exception:
        pickled = None  # the text has all there is to know
    return {"kind": type(error).__name__, "message": str(error), "traceback": text, "pickled": pickled}


def encode_error(error: BaseException) -> tuple[int, bytes, list[Any]]:
    """``(ERROR, pickle, buffers)``"""
    return ERROR, *encode(describe_error(error))


def rebuild_error(failure: Any) -> BaseException | None:
    """The exception that `describe_error` took, or None if it cannot be made here."""
    if failure["pickled"] is None:
        return None
    try:
        error = pickle.loads(failure["pickled"])
    except Exception:
        return None  # its class cannot be imported here; the caller falls back on the text
    return error if isinstance(error, BaseException) else None
