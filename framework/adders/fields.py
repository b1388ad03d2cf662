"""Fields of time steps (observation, action, ...) in one preallocated array per leaf."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from framework import nest as nests
from framework.types import Nest

_SCALARS: dict[type, np.dtype] = {
    float: np.dtype(np.float32),
    int: np.dtype(np.int64),
    bool: np.dtype(np.bool_),
}


def is_absent(nest: Nest) -> bool:
    """Returns whether `nest` is None, `()` or `{}`; False for an array of any shape."""
    return nest is None or (isinstance(nest, (tuple, list, dict)) and len(nest) == 0)


def column_name(field: str, path: tuple[Any, ...]) -> str:
    """Returns the name of a leaf's column in replay and in errors, such as `observation/camera/0`."""
    return "/".join([field, *(str(key) for key in path)])


def result_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which rewards and discounts of `dtype` are kept: float, at least 32 bits."""
    return np.dtype(dtype) if np.dtype(dtype).kind == "f" else np.dtype(np.float32)


class Field:
    """The leaves of one field over the last `length` time steps: arrays `[length, B, *shape]`.

    The first value fixes shapes, dtypes and structure. A Python float counts as float32, an int as int64.
    `to_float` is for rewards and discounts: they are kept as floats and other number types are converted,
    because environments mix them (0 and 0.5, float64 and float32).
    """

    def __init__(self, name: str, example: Nest, envs: int | None, length: int, to_float: bool = False):
        """Allocates the arrays.

        Args:
          name: name of the field, in column names and errors.
          example: the first value, with an env axis if `envs` is a number, of one env if `envs` is None.
          envs: number of envs B, or None.
          length: number of time steps.
          to_float: whether numbers are converted to floats.
        """
        self.name = name
        self.template = example
        self._envs = envs
        self._to_float = to_float
        flat = tree.flatten_with_path(example)
        self.names = [column_name(name, path) for path, _ in flat]
        self._lone = len(flat) == 1 and flat[0][0] == ()
        self._flatten = nests.flattener(example)
        self.arrays: list[np.ndarray] = []
        # The targets of put(): arrays (without the env axis if values have none), the shape and dtype of a
        # value, and the scalar types that need no conversion.
        self._slots: list[tuple[np.ndarray, tuple[int, ...], np.dtype, frozenset[type]]] = []
        for path, leaf in flat:
            dtype: np.dtype = _SCALARS.get(type(leaf), np.asarray(leaf).dtype)
            if to_float:
                dtype = result_dtype(dtype)
            if dtype.kind not in "biufc":
                raise ValueError(
                    f"{column_name(name, path)}: got {leaf!r} of dtype {dtype}, expected numbers. "
                    "Encode it as an array of numbers."
                )
            shape = np.shape(leaf)
            if envs is None:
                array = np.zeros((length, 1, *shape), dtype)
                self._slots.append((array[:, 0], shape, dtype, _fitting_scalars(shape, dtype)))
            else:
                if shape[:1] != (envs,):
                    raise ValueError(
                        f"{column_name(name, path)}: got shape {shape}, expected a leading axis of "
                        f"{envs} envs, as in the time step's step_type."
                    )
                array = np.zeros((length, *shape), dtype)
                self._slots.append((array, shape, dtype, frozenset()))
            self.arrays.append(array)

    def put(self, t: int, value: Nest) -> None:
        """Copies `value` to time index `t`.

        Raises:
          ValueError: Its structure, a shape or a dtype differs from the first value's.
        """
        if self._lone:
            slot, shape, dtype, scalars = self._slots[0]
            kind = type(value)
            if kind is np.ndarray:
                if value.shape == shape and value.dtype == dtype:
                    slot[t] = value
                    return
            elif kind in scalars:
                slot[t] = value
                return
            leaves = [value]
        else:
            try:
                leaves = self._flatten(value)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"{self.name}: got the structure {_outline(value)}, expected {_outline(self.template)} "
                    "as in the first step."
                ) from error
        for i, (slot, shape, dtype, scalars) in enumerate(self._slots):
            leaf = leaves[i]
            if type(leaf) not in scalars and (
                getattr(leaf, "shape", None) != shape or getattr(leaf, "dtype", None) != dtype
            ):
                leaf = self._convert(i, leaf, shape, dtype)
            slot[t] = leaf

    def _convert(self, i: int, leaf: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        try:
            array = np.asarray(leaf)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.names[i]}: got {leaf!r}, expected an array of shape {shape}.") from error
        if array.shape != shape:
            raise ValueError(
                f"{self.names[i]}: got shape {array.shape}, expected {shape} as in the first step. "
                "Every step must have the same shapes; pad, or use one adder for each batch of environments."
            )
        # Python numbers have no dtype; they fit where numpy keeps their kind (bool, int, float).
        weak = type(leaf) in _SCALARS
        convertible = (self._to_float or weak) and np.can_cast(array.dtype, dtype, "same_kind")
        if array.dtype != dtype and not convertible:
            raise ValueError(
                f"{self.names[i]}: got dtype {array.dtype}, expected {dtype} as in the first step. "
                "Convert it before you add it; adders never convert values silently."
            )
        return array

    def repeat(self, t: int) -> None:
        """Copies the values at time index `t` to `t + 1`."""
        for array in self.arrays:
            array[t + 1] = array[t]

    def shift(self, first: int, count: int) -> None:
        """Moves the `count` time steps that start at `first` to the front."""
        for array in self.arrays:
            array[:count] = array[first : first + count]

    def columns(self, first: int, last: int, where: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Returns rows `[first, last)` as `{column: [rows, *shape]}`, ordered by time, then by env.

        Args:
          first: time index of the first row.
          last: time index after the last row.
          where: bool `[last - first, B]` that selects rows; None selects all.
        """
        columns = {}
        for name, array in zip(self.names, self.arrays, strict=True):
            block = array[first:last]
            columns[name] = block.reshape(-1, *array.shape[2:]) if where is None else block[where]
        return columns

    def take(self, index: np.ndarray) -> list[np.ndarray]:
        """Returns, per leaf, the rows with the flat indices `time * B + env`: `[*index.shape, *shape]`."""
        return [array.reshape(-1, *array.shape[2:]).take(index, axis=0) for array in self.arrays]

    def clear(self, first: int, where: np.ndarray) -> None:
        """Sets the rows `first + i` of envs `b` with `where[i, b]` to zero."""
        for array in self.arrays:
            array[first : first + len(where)][where] = 0

    def nest(self, leaves: list[Any]) -> Nest:
        """Returns `leaves` in this field's structure."""
        return leaves[0] if self._lone else tree.unflatten_as(self.template, leaves)


def _fitting_scalars(shape: tuple[int, ...], dtype: np.dtype) -> frozenset[type]:
    """Returns the scalar types that numpy assigns to an array of `dtype` without losing their kind."""
    if shape:
        return frozenset()
    python = {"f": (float, int, bool), "i": (int, bool), "u": (int, bool), "b": (bool,)}.get(dtype.kind, ())
    return frozenset((dtype.type, *python))


def _outline(value: Nest) -> str:
    return str(tree.map_structure(lambda leaf: str(np.shape(leaf)), value))
