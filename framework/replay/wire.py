"""The messages of replay clients and servers: msgpack and raw arrays, never pickles.

A message is a dict with string keys of None, bools, ints, floats, strings, bytes, lists, dicts and numpy
arrays. It becomes one frame of msgpack, followed by one frame for every array of more than `INLINE_BYTES`;
smaller ones are written into the first frame, because a frame costs more than copying them:

```python
frames = wire.encode({"op": "sample", "table": "replay", "n": 256})
message = wire.decode(frames)
```

An array is the extension type 1: the msgpack of its dtype string, its shape, and its data or the number of
its frame. Arrays of Python objects do not travel.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from framework.replay import errors
from launch.errors import MalformedMessage as MalformedMessage

PROTOCOL = 8  # of the messages between clients and servers; see `server.operations`
INLINE_BYTES = 8192
MAX_LAYOUTS = 4096  # of the items of one writer
_ARRAY = 1
_DTYPE = re.compile(r"[<>|=]?[biufcSUmMV?][0-9]{0,9}(\[[0-9A-Za-z]{1,8}\])?")

_ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        *(ValueError, TypeError, KeyError, IndexError, MemoryError, NotImplementedError, RuntimeError),
        *vars(errors).values(),
    )
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


def encode(message: dict[str, Any]) -> list[Any]:
    """Returns the frames of a message: bytes, and memoryviews of its arrays, which must not change until they
    are sent."""
    frames: list[Any] = [b""]

    def pack(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            what = "an array of Python objects" if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(
                f"message: got {what}, expected numbers, strings, lists, dicts, or arrays of numbers, bools "
                "or fixed-width strings. Convert it first."
            )
        array = np.ascontiguousarray(value).reshape(value.shape)
        where: bytes | int = array.tobytes() if array.nbytes <= INLINE_BYTES else len(frames)
        if isinstance(where, int):
            frames.append(array.reshape(-1).view(np.uint8).data)
        return msgpack.ExtType(_ARRAY, msgpack.packb([array.dtype.str, array.shape, where]))

    frames[0] = msgpack.packb(message, default=pack, use_bin_type=True)
    return frames


def decode(frames: Sequence[Any]) -> dict[str, Any]:
    """Returns the message in `frames`, which are bytes or objects with the buffer protocol.

    Arrays are views of the frames, read-only where the frames are.

    Raises:
      MalformedMessage: The frames are not something that `encode` can have written.
    """
    try:
        unpack = functools.partial(_unpack_array, frames)
        message = msgpack.unpackb(frames[0], ext_hook=unpack, raw=False)
        if not isinstance(message, dict):
            raise TypeError(f"got {type(message).__name__}, expected a dict")
    except Exception as error:
        raise MalformedMessage(f"message: {type(error).__name__}: {error}") from None
    return message


@functools.lru_cache(maxsize=256)
def parse_dtype(kind: Any, what: str = "array") -> np.dtype:
    """Returns the dtype that a peer has named as `dtype.str` does, of `what` it says.

    numpy reads other names too, as a list of fields with counts, and raises `SyntaxError` for some of them.

    Raises:
      ValueError: It is not the dtype of numbers, bools or fixed-width text.
      TypeError: `kind` is no string, or numpy does not have the dtype.
    """
    if not _DTYPE.fullmatch(kind):
        raise ValueError(f"{what}: got dtype {kind!r}, expected numbers or text and no objects")
    return np.dtype(kind)


def pack_error(error: BaseException) -> list[str]:
    """An error as it travels: the nearest type that the other side knows, and its text."""
    for kind in type(error).__mro__:
        if kind.__name__ in _ERRORS and _ERRORS[kind.__name__] is kind:
            text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
            return [kind.__name__, text if kind is type(error) else f"{type(error).__name__}: {text}"]
    return ["RuntimeError", f"{type(error).__name__}: {error}"]


def unpack_error(packed: Any) -> BaseException:
    """The exception that `pack_error` wrote."""
    name, text = packed
    return _ERRORS.get(name, RuntimeError)(text)


def _unpack_array(frames: Sequence[Any], code: int, data: bytes) -> np.ndarray:
    """The array of an extension; an error of any kind if it is malformed."""
    kind, shape, where = msgpack.unpackb(data)
    buffer = where if isinstance(where, bytes) else frames[where]
    if code != _ARRAY or buffer is frames[0]:
        raise ValueError(f"got an array in extension {code}, expected its own frame in extension {_ARRAY}")
    dtype, num_bytes = parse_dtype(kind), memoryview(buffer).nbytes
    # An array whose items have no bytes could have any length.
    if min(shape, default=0) < 0 or num_bytes != math.prod(shape) * dtype.itemsize or not dtype.itemsize:
        raise ValueError(f"got {num_bytes} bytes for an array {shape} of {dtype}")
    return np.frombuffer(buffer, dtype).reshape(shape) if num_bytes else np.zeros(shape, dtype)


class Wake:
    """A pipe that is readable from `set` until `clear`. Any thread may set it, at any time.

    Attributes:
      descriptor: the file descriptor to poll.
      is_set: whether the pipe is readable.
    """

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write, False)
        self.is_set = False

    def set(self) -> None:
        """Ends the current poll or, if there is none, the next one."""
        if not self.is_set:
            self.is_set = True
            with contextlib.suppress(BlockingIOError):  # a full pipe is readable anyway
                os.write(self._write, b"!")

    def clear(self) -> None:
        """Makes the next poll wait again. The caller then looks for changes."""
        # The order matters: a `set` in between writes nothing, and this caller then sees its change.
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        self.is_set = False

    def __del__(self) -> None:
        # Earlier, another thread could write to a descriptor that the process has opened again since.
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.descriptor)
            os.close(self._write)
