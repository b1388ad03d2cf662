"""Messages between nodes: a head, a pickle, and large arrays as frames of their own.

A message is a frame `head | pickle` and `buffers` frames with the memory of large arrays (pickle protocol 5,
out of band). A receiver uses the memory of the frames without a copy. The sockets (`launch.rpc.sockets`)
authenticate a peer before anything here reads its messages.

A client sends `CALL` and gets `REPLY` or `ERROR` with the number of the call. It sends `PROBE` with the
numbers (64 bits each) of its open calls and gets `UNKNOWN` with those that the server does not have.
"""

from __future__ import annotations

import pickle
import struct
import time
import traceback
from collections.abc import Sequence
from typing import Any

import zmq

from launch.errors import RemoteError, RemoteTraceback

# kind of message, number of buffers that follow, number of the call within its connection
HEAD = struct.Struct("<BxHxxxxQ")
CALL, REPLY, ERROR, PROBE, UNKNOWN = range(1, 6)
# Arrays below this many bytes are cheaper inside the pickle than as a frame.
IN_BAND_BYTES = 1 << 14
_MAX_BUFFERS = 0xFFFF
_PAUSES = (0.0, 0.01, 0.1)  # seconds, after which a pickle that could not be loaded is tried again
_MAIN = b"__main__"


class MalformedMessage(ValueError):
    """A message that no node of ours would send."""


def encode(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """The pickle of `value` and the large buffers that it leaves out."""
    buffers: list[pickle.PickleBuffer] = []

    def keep_out(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < IN_BAND_BYTES or len(buffers) >= _MAX_BUFFERS:
            return True
        buffers.append(buffer)
        return False

    try:
        data = pickle.dumps(value, 5, buffer_callback=keep_out)
        if _MAIN not in data:
            return data, buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        pass  # lambdas, local classes: cloudpickle can, and its error is the better one if it cannot
    # What is defined in __main__ is another module over there: it has to travel by value.
    import cloudpickle

    buffers.clear()
    return cloudpickle.dumps(value, 5, buffer_callback=keep_out), buffers


def load(data: Any, buffers: Sequence[Any]) -> Any:
    """Returns the value of a pickle; its large arrays use the memory of `buffers`."""
    for pause in _PAUSES:
        try:
            return pickle.loads(data, buffers=buffers)
        except (ImportError, AttributeError, RuntimeError):
            # Threads that import parts of one package at the same time can find each other's modules half
            # made, or want each other's locks. By now this thread holds none: the others may go on.
            time.sleep(pause)
    return pickle.loads(data, buffers=buffers)  # what is missing stays missing


def parse(frames: Sequence[zmq.Frame]) -> tuple[int, int, memoryview, list[Any]]:
    """Returns `(kind, call number, pickle, buffers)` of a received message.

    Raises:
      MalformedMessage: the frames do not fit the head.
    """
    body = frames[0].buffer if frames else memoryview(b"")
    if len(body) < HEAD.size:
        raise MalformedMessage(f"message: got {len(body)} bytes, expected a head of {HEAD.size}")
    kind, count, number = HEAD.unpack_from(body)
    if count != len(frames) - 1:
        raise MalformedMessage(f"message of kind {kind}: got {len(frames) - 1} buffers, expected {count}")
    return kind, number, body[HEAD.size :], [frame.buffer for frame in frames[1:]]


def head(kind: int, number: int, buffers: int = 0) -> bytes:
    return HEAD.pack(kind, buffers, number)


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: its kind, message, traceback, and its pickle where it has one."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    pickled: bytes | None = None
    try:
        import cloudpickle

        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)  # exceptions whose __init__ wants more than `args` fail only here
    except Exception:
        pickled = None  # the text has all there is to know
    return {"kind": type(error).__name__, "message": str(error), "traceback": text, "pickled": pickled}


def rebuild_call_error(failure: Any, node: str) -> BaseException:
    """The exception of a call that failed in `node`, with the remote traceback as its `__cause__`."""
    error = rebuild_error(failure) or RemoteError(failure["kind"], failure["message"])
    error.__cause__ = RemoteTraceback(node, failure["traceback"])
    return error


def rebuild_error(failure: Any) -> BaseException | None:
    """The exception that `describe_error` took, or None if it cannot be made here."""
    if failure["pickled"] is None:
        return None
    try:
        error = pickle.loads(failure["pickled"])
    except Exception:
        return None  # its class cannot be imported here; the caller falls back on the text
    return error if isinstance(error, BaseException) else None
