"""Rows: arrays of several time steps, into which an environment writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import tree

from framework import nest as nests
from framework.types import Nest


class Row(NamedTuple):
    """One time step of B envs.

    Attributes:
      timestep: the time step, whose leaves are the arrays of `fields`.
      fields: the leaves of each field, in the order of the time step.
      exact: float64 arrays for the same rewards, before they are rounded.
    """

    timestep: Any
    fields: list[list[np.ndarray]]
    exact: list[np.ndarray]


class TimeStepRows:
    """The arrays `[time, B, ...]` of time steps, of which an environment writes row `at`.

    The owner of the rows moves `at` on, and calls `check` before it uses what they hold.

    Attributes:
      rows: by time index, one time step each.
      at: time index of the time step that is written next.
      verify: checks the leaves of each field and the exact rewards, `[n * B, ...]`; None: they are checked.
      fault: the error of a check that has failed, after which nothing of the rows may be used; else None.
    """

    def __init__(
        self,
        example: Any,
        first: int,
        last: int,
        held: Mapping[str, tuple[Sequence[np.ndarray], int]] | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ):
        """Makes the rows.

        Args:
          example: a time step of B envs.
          first: time index of the first row.
          last: time index of the last row.
          held: by field, arrays that exist, one for each leaf, and the time index of their first row. The
            arrays of other fields are new.
          lock: the owner holds it while it moves rows.
        """
        length = last - first + 1

        def made(nest: Nest) -> list[np.ndarray]:
            return [np.zeros((length, *leaf.shape), leaf.dtype) for leaf in tree.flatten(nest)]

        fields = example._asdict()
        self._held = [(held or {}).get(name) or (made(nest), first) for name, nest in fields.items()]
        self._exact = [np.zeros((length, *leaf.shape)) for leaf in tree.flatten(example.reward)]
        build = nests.unflattener(example)
        self.rows: dict[int, Row] = {}
        for t in range(first, last + 1):
            leaves = [[array[t - start] for array in arrays] for arrays, start in self._held]
            timestep = build([leaf for each in leaves for leaf in each])
            self.rows[t] = Row(timestep, leaves, [array[t - first] for array in self._exact])
        self.first, self.last = first, last
        self.at = self._checked = first
        self.verify: Callable[[list[list[np.ndarray]], list[np.ndarray]], None] | None = None
        self.fault: BaseException | None = None
        self._lock = threading.Lock() if lock is None else lock

    def fits(self, example: Any) -> bool:
        """Whether time steps like this one, of arrays, can be written here."""
        mine = self.rows[self.first].timestep
        leaves = zip(tree.flatten(mine), tree.flatten(example), strict=False)
        return type(mine) is type(example) and all(
            (own.shape, own.dtype) == (other.shape, other.dtype) for own, other in leaves
        )

    def check(self) -> None:
        """Checks the rows that have been written since the last check.

        Raises:
          EnvironmentFault: The environment broke its contract. Each later call raises it, until `restart`.
        """
        with self._lock:
            first, last = self._checked, self.at
            if self.fault is not None:
                raise self.fault
            if first == last or self.verify is None:
                return
            fields = [
                [_flat(each[first - start : last - start]) for each in held] for held, start in self._held
            ]
            exact = [_flat(each[first - self.first : last - self.first]) for each in self._exact]
            try:
                self.verify(fields, exact)
            except BaseException as error:
                self.fault = error
                raise
            self._checked = last

    def advance(self) -> None:
        """Goes on at the next row, or checks all, and begins with the first again."""
        self.at += 1
        if self.at > self.last:
            self.check()
            self.move(self.first)

    def move(self, at: int) -> None:
        """Goes on at another row; those before it are forgotten."""
        self.at = self._checked = at

    def restart(self, at: int) -> None:
        """Goes on at a row after a reset of the environment."""
        self.move(at)
        self.fault = None


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:])
