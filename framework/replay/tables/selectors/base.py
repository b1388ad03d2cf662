"""What a table asks of a selector. Everything is about *slots*, the table's small integers for its items."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np


class Selector(abc.ABC):
    """Chooses among the slots it was told of. It belongs to one table, whose lock guards every call.

    Calls about several slots mean the same as one call for each in order, only faster; slots in one call are
    distinct.
    `stamps` grow with each insertion into the table and say who came first.
    """

    #: Whether choosing needs no random numbers; the probability is 1 then.
    deterministic = True
    #: Whether the choice depends on priorities.
    uses_priorities = False
    #: The table that it belongs to, once it does.
    owner: str | None = None

    def check(self, low: float, high: float) -> None:
        """ValueError if priorities in `[low, high]`, finite and >= 0, are of no use to this selector."""
        return None

    @abc.abstractmethod
    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        """Adds slots that are not there."""

    @abc.abstractmethod
    def delete(self, slots: np.ndarray) -> None:
        """Removes slots that are there."""

    @abc.abstractmethod
    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities for slots that are there."""

    @abc.abstractmethod
    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """`n` choices that change nothing: slots int64 `[n]` and probabilities float64 `[n]`. Not when
        empty."""

    def replace(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        """The slots that are there hold new items now: delete, then insert."""
        self.delete(slots)
        self.insert(slots, priorities, stamps)

    def first(self, n: int) -> np.ndarray:
        """The `n` slots that a deterministic selector would choose if each left when it is chosen."""
        raise NotImplementedError

    @abc.abstractmethod
    def clear(self) -> None:
        """Forgets every slot."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many slots are there."""

    def __bool__(self) -> bool:
        return True  # an empty selector is one all the same: `sampler or Uniform()`

    def total_weight(self) -> float:
        """The sum of what its choice goes by: as many as there are slots where they are all alike."""
        return float(len(self))

    def options(self) -> dict[str, Any]:
        """What it was made with."""
        return {}

    def config(self) -> dict[str, Any]:
        """Its kind and its options, for `server_info` and checkpoints."""
        return {"kind": type(self).__name__, **self.options()}

    def copy(self) -> Selector:
        """A new, empty one made with the same options."""
        return type(self)(**self.options())

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint needs beyond slots, priorities and stamps to go on in exactly the same way."""
        return {}

    def restore(
        self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray, state: dict[str, np.ndarray]
    ) -> None:
        """Becomes what it was when `state` was taken; `slots` are in order of `stamps`."""
        self.clear()
        self.insert(slots, priorities, stamps)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({options})"
