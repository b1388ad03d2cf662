"""A sum tree of wide fanout over float64 weights, for all leaves of a request at once.

Every inner sum is computed from its children, never by adding differences, so that it does not drift. The
weights are float64 because with float32 a few million weights of very different sizes do not add up to within
one of the small ones.
"""

from __future__ import annotations

import numpy as np

from framework.replay import kernels
from framework.replay.kernels import FANOUT

# The root level is one array, searched through its running sum: cheaper than one more level.
_ROOT = 2048


class SumTree:
    """Weights >= 0 of the leaves 0, 1, …; a leaf that was never set weighs 0. The tree grows with its
    leaves."""

    def __init__(self, capacity: int = FANOUT):
        self._kernels = kernels.load()
        self._build(capacity)

    def _build(self, capacity: int) -> None:
        sizes = [-(-capacity // FANOUT) * FANOUT]
        while sizes[-1] > _ROOT:
            sizes.append(-(-sizes[-1] // FANOUT**2) * FANOUT)
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)  # of the levels, leaves first
        self._flat = np.zeros(self._starts[-1])
        # Running sums of the highest level, None after a change.
        self._sums: np.ndarray | None = None

    def __len__(self) -> int:
        return int(self._starts[1])

    def _running_sums(self) -> np.ndarray:
        if self._sums is None:
            self._sums = self._flat[self._starts[-2] :].cumsum()
        return self._sums

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._running_sums()[-1])

    def set(self, leaves: np.ndarray, weights: np.ndarray) -> None:
        """Sets the weights of `leaves`, in order."""
        if not len(leaves):
            return
        highest = int(np.maximum.reduce(leaves))
        if highest >= self._starts[1]:
            old = self._flat[: self._starts[1]]
            self._build(max(highest + 1, 2 * len(old)))
            self._kernels.tree_set(self._flat, self._starts, np.arange(len(old)), old)
        self._sums = None
        self._kernels.tree_set(self._flat, self._starts, leaves, weights)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """`n` independent leaves in proportion to their weights, and their probabilities. The total must
        be > 0."""
        sums = self._running_sums()
        total = float(sums[-1])
        leaves, weights = self._kernels.tree_descend(self._flat, self._starts, sums, rng.random(n) * total)
        while not weights.all():
            # Rounding can end a descent just past the last child that weighs anything: draw those again.
            again = np.flatnonzero(weights == 0.0)
            leaves[again], weights[again] = self._kernels.tree_descend(
                self._flat, self._starts, sums, rng.random(len(again)) * total
            )
        weights /= total
        return leaves, weights
