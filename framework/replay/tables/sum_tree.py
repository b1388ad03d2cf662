"""A sum tree of wide fanout over float64 weights, for all leaves of a request at once.

Every inner sum is computed from its children, never by adding differences, so that it does not drift. The
weights are float64 because with float32 a few million weights of very different sizes do not add up to within
one of the small ones.
"""

from __future__ import annotations

import numpy as np

from framework.replay import kernels
from framework.replay.kernels import FANOUT, Tree

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
        self._tree = Tree(sizes)
        # Running sums of the highest level, None after a change.
        self._sums: np.ndarray | None = None

    def _running_sums(self) -> np.ndarray:
        if self._sums is None:
            self._sums = self._tree.levels[-1].cumsum()
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
        old = self._tree.levels[0]
        if highest >= len(old):
            self._build(max(highest + 1, 2 * len(old)))
            self._kernels.tree_set(self._tree, np.arange(len(old)), old)
        self._sums = None
        self._kernels.tree_set(self._tree, leaves, weights)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """`n` independent leaves in proportion to their weights, and their probabilities. The total must
        be > 0."""
        sums = self._running_sums()
        total = float(sums[-1])
        leaves, weights = self._kernels.tree_descend(self._tree, sums, rng.random(n) * total)
        while np.count_nonzero(weights) < len(weights):
            # Rounding can end a descent just past the last child that weighs anything: draw those again.
            again = np.flatnonzero(weights == 0.0)
            mass = rng.random(len(again)) * total
            leaves[again], weights[again] = self._kernels.tree_descend(self._tree, sums, mass)
        weights /= total
        return leaves, weights
