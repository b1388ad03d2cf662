"""Specs from data: how environments in other processes describe their arrays, in msgpack or JSON.

A leaf is a dict of `shape` and `dtype`, and where they apply `minimum` and `maximum` (a number or nested
lists), `num_values` (of a discrete value that counts from 0) and `stacked` (the newest frames, oldest first;
see `specs.StackedArray`). Dicts and lists of leaves are nests; a list is a tuple.
`environment_server.describe_spec` is the inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from framework import specs
from framework.environments.remote.environment_server import is_leaf
from framework.types import Nest

_KEYS = {"shape", "dtype", "minimum", "maximum", "num_values", "stacked"}
_MAX_BYTES = 1 << 28  # of one array
_MAX_DEPTH = 16


def parse_environment_spec(data: Any) -> specs.EnvironmentSpec:
    """Returns the specs of a dict with `observations` and `actions`.

    `rewards` and `discounts` are one float32 each, unless the dict has entries for them.

    Raises:
      ValueError: The data does not describe arrays. The text names the place.
    """
    fields = ("observations", "actions", "rewards", "discounts")
    if not isinstance(data, Mapping) or not {"observations", "actions"} <= set(data) <= set(fields):
        raise ValueError(f"specs: got {_short(data)}, expected a dict with observations and actions.")
    scalar = {"shape": [], "dtype": "float32"}
    defaults = {"rewards": scalar, "discounts": {**scalar, "minimum": 0.0, "maximum": 1.0}}
    return specs.EnvironmentSpec(*[parse_spec({**defaults, **data}[name], name[:-1]) for name in fields])


def parse_spec(data: Any, name: str, depth: int = 0) -> Nest:
    """Returns the nest of specs that `data` describes; ValueError if it does not."""
    if is_leaf(data):
        try:
            return _leaf(data, name)
        except (TypeError, ValueError, OverflowError, MemoryError, SyntaxError) as error:
            # np.dtype raises the last one, because it evaluates the numbers in such names as "2i4".
            raise ValueError(f"{name}: got {_short(data)}, expected the spec of an array: {error}") from None
    if depth < _MAX_DEPTH and isinstance(data, dict) and data and all(isinstance(key, str) for key in data):
        return {key: parse_spec(child, f"{name}/{key}", depth + 1) for key, child in data.items()}
    if depth < _MAX_DEPTH and isinstance(data, list | tuple) and data:
        return tuple(parse_spec(child, f"{name}/{index}", depth + 1) for index, child in enumerate(data))
    raise ValueError(
        f"{name}: got {_short(data)}, expected a dict with shape and dtype, or a dict or list of such."
    )


def _leaf(data: Mapping[str, Any], name: str) -> specs.Array:
    if unknown := set(data) - _KEYS:
        raise ValueError(f"unknown entries {sorted(map(str, unknown))}")
    dtype, shape = np.dtype(data["dtype"]), tuple(data.get("shape", ()))
    if dtype.kind not in "biuf":
        raise ValueError("the dtype must be of numbers or bools")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("the shape must be of whole numbers")
    if float(np.prod([float(size) for size in shape])) * dtype.itemsize > _MAX_BYTES or len(shape) > 8:
        raise ValueError(f"the array is larger than {_MAX_BYTES} bytes or has more than 8 dimensions")
    count, stacked = data.get("num_values"), bool(data.get("stacked"))
    if count is not None:
        if type(count) is not int or shape or dtype.kind not in "iu":
            raise ValueError("num_values must be a whole number, of one integer")
        return specs.DiscreteArray(count, dtype, name=name)
    if stacked and not shape:
        raise ValueError("stacked frames need a first dimension")
    if data.get("minimum") is None or data.get("maximum") is None:
        return (specs.StackedArray if stacked else specs.Array)(shape, dtype, name=name)
    bounds = [np.asarray(data[bound], dtype) for bound in ("minimum", "maximum")]
    return (specs.StackedBoundedArray if stacked else specs.BoundedArray)(shape, dtype, *bounds, name=name)


def _short(data: Any) -> str:
    try:
        text = repr(data)
    except RecursionError:  # the decoder admits nests that are too deep for this
        text = type(data).__name__
    return text if len(text) < 200 else f"{text[:200]}..."
