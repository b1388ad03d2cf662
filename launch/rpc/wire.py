"""Messages between nodes: a head, a pickle, and large arrays in separate frames.

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
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from launch import pickling
from launch.errors import MalformedMessage, NodeError, RemoteError, RemoteTraceback, describe

# kind of message, number of buffers that follow, number of the call within its connection
HEAD = struct.Struct("<BxHxxxxQ")
CALL, REPLY, ERROR, PROBE, UNKNOWN = range(1, 6)
# Arrays smaller than this, in bytes, are cheaper inside the pickle than as a frame.
IN_BAND_BYTES = 1 << 14
_MAX_BUFFERS = 0xFFFF
_PAUSES = (0.0, 0.01, 0.1)  # seconds before each attempt to load a pickle
_MAIN = b"__main__"


def encode(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Returns the pickle of `value` and the large buffers that it leaves out."""
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
        pass  # cloudpickle can pickle lambdas and local classes, and its errors are clearer
    # In the other process __main__ is another module, so its objects are pickled by value.
    buffers.clear()
    return pickling.dumps(value, keep_out), buffers


def load(data: Any, buffers: Sequence[Any]) -> Any:
    """Returns the value of a pickle; its large arrays use the memory of `buffers`."""
    for pause in _PAUSES:
        try:
            return pickle.loads(data, buffers=buffers)
        except (ImportError, AttributeError, KeyError, RuntimeError):
            # Threads that import parts of one package at the same time may find each other's modules
            # partially initialized or gone, or wait for each other's locks. Now this thread holds no lock,
            # and the other threads can finish.
            time.sleep(pause)
    return pickle.loads(data, buffers=buffers)  # the last attempt: its error is final


def parse(frames: Sequence[zmq.Frame]) -> tuple[int, int, memoryview, list[Any]]:
    """Returns `(kind, call number, pickle, buffers)` of a received message.

    Raises:
      MalformedMessage: The frames do not fit the head.
    """
    body = frames[0].buffer if frames else memoryview(b"")
    if len(body) < HEAD.size:
        raise MalformedMessage(f"message: got {len(body)} bytes, expected a head of {HEAD.size}.")
    kind, count, number = HEAD.unpack_from(body)
    if count != len(frames) - 1:
        raise MalformedMessage(f"message of kind {kind}: got {len(frames) - 1} buffers, expected {count}.")
    return kind, number, body[HEAD.size :], [frame.buffer for frame in frames[1:]]


def head(kind: int, number: int, buffers: int = 0) -> bytes:
    return HEAD.pack(kind, buffers, number)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Returns an exception as plain data: its kind, message, traceback, and pickle if it has one.

    `frames` is the traceback without this project's frames, which the exception loses.
    """
    pickled: bytes | None = None
    try:
        import cloudpickle

        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)  # exceptions whose __init__ takes more than `args` fail only here
    except Exception:
        pickled = None  # the text describes the error
    return {**describe(error), "pickled": pickled}


def rebuild_error(failure: Mapping[str, Any], node: str) -> BaseException:
    """Returns the exception that `describe_error` described in `node`, with the traceback as its `__cause__`.

    It is a `RemoteError` if it has no pickle, or its class cannot be imported here.
    """
    try:
        error: BaseException = pickle.loads(failure["pickled"])
    except Exception:
        error = RemoteError(failure["kind"], failure["message"])
    # The class may refuse changes, as a frozen dataclass does.
    object.__setattr__(error, "__cause__", RemoteTraceback(node, failure["frames"], failure["place"]))
    return error


def node_error(label: str, failure: Mapping[str, Any]) -> NodeError:
    """Returns the `NodeError` for a failure that `describe_error` described elsewhere."""
    error = NodeError(label, **{name: text for name, text in failure.items() if name != "pickled"})
    error.__cause__ = rebuild_error(failure, label)
    return error
