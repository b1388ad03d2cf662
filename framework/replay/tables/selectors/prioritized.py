"""In proportion to a power of the priority (Schaul et al. 2015, "Prioritized Experience Replay")."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from framework.replay.tables.selectors.base import Selector
from framework.replay.tables.selectors.uniform import Uniform
from framework.replay.tables.sum_tree import SumTree

# Sums of billions of weights must stay finite.
_LARGEST = 1e290


class Prioritized(Selector):
    """P(i) = p_i ** e / sum_j p_j ** e.

    A priority of 0 means never, whatever the exponent, unless all are 0: then every item is as likely as any
    other.

    Args:
      priority_exponent: e; 0 makes all items with a priority > 0 equally likely, negative inverts the order.
    """

    deterministic = False
    uses_priorities = True

    def __init__(self, priority_exponent: float):
        if not math.isfinite(priority_exponent):
            raise ValueError(f"priority_exponent: got {priority_exponent}, expected a finite number")
        self.priority_exponent = float(priority_exponent)
        self.clear()

    def clear(self) -> None:
        self._tree = SumTree()
        self._members = Uniform()  # for when all weights are 0

    def __len__(self) -> int:
        return len(self._members)

    def check(self, low: float, high: float) -> None:
        extreme = high if self.priority_exponent >= 0.0 else (low or high)
        try:
            weight = float(extreme) ** self.priority_exponent if extreme else 0.0
        except OverflowError:
            weight = math.inf
        if weight > _LARGEST:
            raise ValueError(
                f"priorities: got {extreme:g}, whose power {self.priority_exponent:g} is above "
                f"{_LARGEST:g}: sums of such "
                "weights would overflow; scale the priorities. Nothing was changed"
            )

    def weights(self, priorities: np.ndarray) -> np.ndarray:
        """`priorities ** e` with 0 for 0."""
        if self.priority_exponent == 1.0:
            return priorities
        if self.priority_exponent > 0.0:
            return priorities**self.priority_exponent
        weights = np.zeros(len(priorities))
        np.power(priorities, self.priority_exponent, out=weights, where=priorities > 0)
        return weights

    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        self._members.insert(slots, priorities, stamps)
        self._tree.set(slots, self.weights(priorities))

    def replace(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        self._tree.set(slots, self.weights(priorities))

    def delete(self, slots: np.ndarray) -> None:
        self._members.delete(slots)
        self._tree.set(slots, np.zeros(len(slots)))

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._tree.set(slots, self.weights(priorities))

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        if not self._tree.total > 0.0:
            return self._members.sample(n, rng)
        return self._tree.sample(n, rng)

    def total_weight(self) -> float:
        return self._tree.total

    def options(self) -> dict[str, Any]:
        return {"priority_exponent": self.priority_exponent}

    def state(self) -> dict[str, np.ndarray]:
        return self._members.state()

    def restore(
        self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray, state: dict[str, np.ndarray]
    ) -> None:
        self.clear()
        self._members.restore(slots, priorities, stamps, state)
        self._tree.set(slots, self.weights(priorities))
