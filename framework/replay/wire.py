"""How messages travel between replay clients and servers: msgpack and raw arrays, never pickles.

A message is a dict with string keys of None, bools, ints, floats, strings, bytes, lists, dicts and numpy
arrays. It becomes one frame of msgpack, followed by one frame for every array of more than `INLINE_BYTES`;
smaller ones are written into the first frame, because a frame costs more than copying them:

```python
frames = wire.encode({"op": "sample", "table": "replay", "n": 256})
message = wire.decode(frames)
```

An array is the extension type 1 (inline) or 2 (a frame of its own): one byte with the length of its dtype
string, that string, one byte with its rank, the shape as little-endian int64, then the data or the uint32
number of its frame. Arrays of Python objects do not travel.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from framework.replay import errors

PROTOCOL = 3  # of the messages between clients and servers; see `server.operations`
INLINE_BYTES = 8192
MAX_ARRAYS = 4096  # in one message
_INLINE, _FRAME = 1, 2
_DTYPE = re.compile(rb"[<>|=]?[biufcSUmMV?][0-9]{0,9}(\[[0-9A-Za-z]{1,8}\])?")

_ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        *(ValueError, TypeError, KeyError, IndexError, MemoryError, NotImplementedError, RuntimeError),
        *vars(errors).values(),
    )
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


class MalformedMessage(ValueError):
    """A peer sent what is not a message of this protocol."""


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
        kind = array.dtype.str.encode()
        head = struct.pack(f"<B{len(kind)}sB{array.ndim}q", len(kind), kind, array.ndim, *array.shape)
        if array.nbytes <= INLINE_BYTES:
            return msgpack.ExtType(_INLINE, head + array.tobytes())
        if len(frames) > MAX_ARRAYS:
            raise ValueError(f"message: got more than {MAX_ARRAYS} large arrays. Send fewer at a time.")
        frames.append(array.reshape(-1).view(np.uint8).data)
        return msgpack.ExtType(_FRAME, head + struct.pack("<I", len(frames) - 1))

    frames[0] = msgpack.packb(message, default=pack, use_bin_type=True)
    return frames


def decode(frames: Sequence[Any]) -> dict[str, Any]:
    """Returns the message in `frames`, which are bytes or objects with the buffer protocol.

    Arrays are views of the frames, read-only where the frames are.

    Raises:
      MalformedMessage: anything that `encode` cannot have written.
    """
    try:
        if not 1 <= len(frames) <= MAX_ARRAYS + 1:
            raise ValueError(f"got {len(frames)} frames, expected 1 to {MAX_ARRAYS + 1}")
        unpack = functools.partial(_unpack_array, frames)
        message = msgpack.unpackb(frames[0], ext_hook=unpack, raw=False)
        if not isinstance(message, dict):
            raise TypeError(f"got {type(message).__name__}, expected a dict")
    except Exception as error:
        raise MalformedMessage(f"message: {type(error).__name__}: {error}") from None
    return message


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
    end = 1 + data[0]
    kind, rank = data[1:end], data[end]
    shape = struct.unpack_from(f"<{rank}q", data, end + 1)
    offset = end + 1 + 8 * rank
    buffer: Any = data
    if code == _FRAME:
        (number,) = struct.unpack_from("<I", data, offset)
        buffer, offset = frames[number], 0
    if code not in (_INLINE, _FRAME) or buffer is frames[0] or not _DTYPE.fullmatch(kind):
        raise ValueError(f"got an array of dtype {kind!r} in extension {code}, expected numbers or text")
    dtype, count = np.dtype(kind.decode()), math.prod(shape)
    num_bytes = memoryview(buffer).nbytes - offset
    # An array whose items have no bytes could have any length.
    if any(size < 0 for size in shape) or num_bytes != count * dtype.itemsize or not dtype.itemsize:
        raise ValueError(f"got {num_bytes} bytes for an array {shape} of {dtype}")
    if num_bytes == 0:
        return np.zeros(shape, dtype)
    return np.frombuffer(buffer, dtype, count, offset).reshape(shape)
