# ruff: noqa: B905, UP035  (Python 3.8)
"""The messages between the servers of environments and a run.

Messages are msgpack lists `[kind, ...]` over a ZeroMQ DEALER socket with CURVE; nothing is unpickled:

    server to run    hello protocol envs spec    timestep leaves    fault text
    run to server    take envs seed    reset    step leaves    release    refuse text    ping

`leaves` are the bytes of arrays `[envs, ...]`; a dict's are in the order of its sorted keys. In `step`
they are the actions. In `timestep` they are the step type (int64), rewards, discounts and observations, and
with several agents the step type of each. An env whose last step was LAST begins an episode at the next
`step`, which ignores its action.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import msgpack
import numpy as np

PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 28
_MAX_OBJECTS = 1 << 17  # lists and dicts in a message; an empty one takes 1 byte there, and 70 in memory


class UnreadableMessage(ValueError):
    """A peer sent something that is not a message of this protocol."""


def pack(kind: str, *content: Any) -> bytes:
    return msgpack.packb([kind, *content], use_bin_type=True)


def unpack(frame: Any) -> tuple[str, list[Any]]:
    """Returns the kind and the content of a message; raises UnreadableMessage."""
    left = [_MAX_OBJECTS]

    def count(made: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError(f"got more than {_MAX_OBJECTS} lists and dicts")
        return made

    try:
        message = msgpack.unpackb(frame, raw=False, list_hook=count, object_hook=count)
    except Exception as error:  # msgpack's errors have no common class
        raise UnreadableMessage(f"message: {type(error).__name__}: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise UnreadableMessage(f"message: got {type(message).__name__}, expected a list [kind, ...].")
    return message[0], message[1:]


def fields(kind: str, content: list[Any], count: int) -> list[Any]:
    if len(content) != count:
        raise UnreadableMessage(f"{kind}: got {len(content)} fields, expected {count}.")
    return content


def flatten(nest: Any) -> list[Any]:
    """Leaves of dicts, by their sorted keys, and of lists and tuples."""
    if isinstance(nest, dict) and not is_leaf(nest):
        return [leaf for key in sorted(nest) for leaf in flatten(nest[key])]
    if isinstance(nest, (list, tuple)):
        return [leaf for child in nest for leaf in flatten(child)]
    return [nest]


def is_leaf(data: Any) -> bool:
    """Whether spec data describes one array."""
    return isinstance(data, dict) and isinstance(data.get("dtype"), str)


def unflatten(data: Any, leaves: Iterator[Any]) -> Any:
    """A nest with the structure of spec data."""
    if is_leaf(data):
        return next(leaves)
    if isinstance(data, dict):
        children = {key: unflatten(data[key], leaves) for key in sorted(data)}
        return {key: children[key] for key in data}
    return tuple(unflatten(child, leaves) for child in data)


def to_bytes(arrays: Sequence[np.ndarray]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def from_bytes(content: Any, layout: Sequence[tuple[np.dtype, tuple[int, ...]]]) -> list[np.ndarray]:
    """Arrays of the dtypes and shapes of `layout`, read-only; raises UnreadableMessage."""
    sizes = [dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for dtype, shape in layout]
    if not isinstance(content, list) or [len(x) if isinstance(x, bytes) else -1 for x in content] != sizes:
        got = content[:16] if isinstance(content, list) else [content]
        got = [len(x) if isinstance(x, bytes) else type(x).__name__ for x in got]
        raise UnreadableMessage(f"leaves: got {got}, expected bytes of the lengths {sizes}.")
    return [
        np.frombuffer(data, dtype).reshape(shape) if data else np.zeros(shape, dtype)
        for data, (dtype, shape) in zip(content, layout)
    ]


def layout_of(data: Any, num_envs: int) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Dtype and shape `[num_envs, ...]` of each leaf of spec data."""
    return [(np.dtype(leaf["dtype"]), (num_envs, *leaf["shape"])) for leaf in flatten(data)]
