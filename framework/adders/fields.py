"""Fields of time steps (observation, action, ...) in one preallocated array per leaf."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from framework import nest as nests
from framework.specs import path_name
from framework.types import Nest

_SCALARS: dict[type, np.dtype] = {
    float: np.dtype(np.float32),
    int: np.dtype(np.int64),
    bool: np.dtype(np.bool_),
}
# Kinds of dtypes. A Python number fits a dtype of its own kind and of each later kind.
_KINDS = "biufc"


def is_absent(nest: Nest) -> bool:
    """Returns whether `nest` is None, `()` or `{}`; False for an array of any shape."""
    return nest is None or (isinstance(nest, (tuple, list, dict)) and len(nest) == 0)


def dtype_of(leaf: Any) -> np.dtype:
    """Returns the dtype of an array, or the one in which a Python number is kept."""
    return _SCALARS[type(leaf)] if type(leaf) in _SCALARS else np.asarray(leaf).dtype


def result_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which rewards and discounts of `dtype` are kept: float, at least 32 bits."""
    return np.promote_types(dtype, np.float32) if np.dtype(dtype).kind == "f" else np.dtype(np.float32)


def grown(array: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
    """Returns `array`, with rows of `fill` at its end if it has fewer than `length` rows."""
    missing = length - len(array)
    if missing <= 0:
        return array
    return np.concatenate([array, np.full((missing, *array.shape[1:]), fill, array.dtype)])


class Field:
    """The leaves of one field over several time steps: arrays `[length, B, *shape]`.

    The first value fixes shapes, dtypes and structure. A Python float counts as float32, an int as int64.
    `to_float` is for rewards and discounts: they are kept as floats and other number types are converted,
    because environments mix them (0 and 0.5, float64 and float32).

    Time indices are the adder's. The arrays begin at time index `skip`.
    """

    def __init__(
        self,
        name: str,
        example: Nest,
        batch: tuple[int, ...],
        block: int,
        history: int,
        *,
        keeps_history: bool = True,
        to_float: bool = False,
    ):
        """Allocates the arrays.

        Args:
          name: name of the field, in column names and errors.
          example: the first value; leaves `[*batch, ...]`.
          batch: `(B,)`, or `()` if values belong to one env and have no env axis.
          block: number of time steps from the time index `history` on.
          history: number of time steps before them.
          keeps_history: whether the arrays hold those, too.
          to_float: whether numbers are converted to floats.
        """
        self.name = name
        self.template = example
        self.keeps_history = keeps_history
        self.skip = 0 if keeps_history else history
        self._to_float = to_float
        flat = tree.flatten_with_path(example)
        self.names = [path_name(name, path) for path, _ in flat]
        self._lone = len(flat) == 1 and flat[0][0] == ()
        self._flatten = nests.flattener(example)
        self.arrays: list[np.ndarray] = []
        self._expected: list[tuple[tuple[int, ...], np.dtype]] = []  # the shape and dtype of each leaf
        for path, leaf in flat:
            dtype = dtype_of(leaf)
            if to_float:
                dtype = result_dtype(dtype)
            if dtype.kind not in _KINDS:
                raise ValueError(
                    f"{path_name(name, path)}: got {leaf!r} of dtype {dtype}, expected numbers. "
                    "Encode it as an array of numbers."
                )
            shape = np.shape(leaf)
            if shape[: len(batch)] != batch:
                raise ValueError(
                    f"{path_name(name, path)}: got shape {shape}, expected a leading axis of "
                    f"{batch[0]} envs, as in the time step's step_type."
                )
            length = block + history - self.skip
            self.arrays.append(np.zeros((length, *(batch or (1,)), *shape[len(batch) :]), dtype))
            self._expected.append((shape, dtype))

    def put(self, t: int, value: Nest) -> None:
        """Copies `value` to time index `t`.

        Raises:
          ValueError: Its structure, a shape or a dtype differs from the first value's.
        """
        try:
            leaves = [value] if self._lone else self._flatten(value)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"{self.name}: got the structure {_outline(value)}, expected {_outline(self.template)} "
                "as in the first step."
            ) from error
        for i, (shape, dtype) in enumerate(self._expected):
            leaf = leaves[i]
            if getattr(leaf, "shape", None) != shape or getattr(leaf, "dtype", None) != dtype:
                leaf = self._convert(self.names[i], leaf, shape, dtype)
            self.arrays[i][t - self.skip] = leaf

    def _convert(self, name: str, leaf: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        try:
            array = np.asarray(leaf)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: got {leaf!r}, expected an array of shape {shape}.") from error
        if array.shape != shape:
            raise ValueError(
                f"{name}: got shape {array.shape}, expected {shape} as in the first step. "
                "Every step must have the same shapes; pad, or use one adder for each batch of environments."
            )
        if type(leaf) in _SCALARS:  # Python numbers have no dtype.
            fits = array.dtype.kind in _KINDS[: _KINDS.index(dtype.kind) + 1]
        else:
            fits = array.dtype == dtype or (self._to_float and np.can_cast(array.dtype, dtype, "same_kind"))
        if not fits:
            raise ValueError(
                f"{name}: got dtype {array.dtype}, expected {dtype} as in the first step. "
                "Convert it before you add it; adders never convert values silently."
            )
        return leaf if type(leaf) in _SCALARS else array

    def repeat(self, t: int) -> None:
        """Copies the values at time index `t` to `t + 1`."""
        for array in self.arrays:
            array[t + 1 - self.skip] = array[t - self.skip]

    def clear(self, index: np.ndarray) -> None:
        """Sets the rows with the flat indices `time * B + env` to zero, in a field that keeps its history."""
        for array in self.arrays:
            array.reshape(-1, *array.shape[2:])[index] = 0

    def shift(self, by: int, history: int) -> None:
        """Moves the time step `by + history`, and those before it that are kept, `by` to the front."""
        skip = 0 if self.keeps_history else history
        first, last = by + skip - self.skip, by + history + 1 - self.skip
        if first:
            for array in self.arrays:
                array[: last - first] = array[first:last]
        self.skip = skip

    def grow(self, length: int) -> None:
        """Makes the arrays at least `length` time steps long."""
        self.arrays = [grown(array, length) for array in self.arrays]

    def take(self, index: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows as `{column: [*index.shape, *shape]}`.

        Args:
          index: flat indices `time * B + env`, from `skip * B` on: a slice (of whole time steps, a view), or
            an int64 array (a copy).
        """
        columns = {}
        for name, array in zip(self.names, self.arrays, strict=True):
            flat = array.reshape(-1, *array.shape[2:])
            offset = self.skip * array.shape[1]
            if isinstance(index, slice):
                columns[name] = flat[index.start - offset : index.stop - offset]
            else:
                columns[name] = flat.take(index - offset if offset else index, axis=0)
        return columns


def _outline(value: Nest) -> str:
    return str(tree.map_structure(lambda leaf: str(np.shape(leaf)), value))
