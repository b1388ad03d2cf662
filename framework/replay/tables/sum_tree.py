"""A sum tree of wide fanout over float64 weights, vectorised over the leaves of a request.

Every inner sum is computed anew from its children, never by adding differences, so that it does not drift;
float64
because with float32 a few million weights of very different sizes do not add up to within one of the small
ones.
"""

from __future__ import annotations

import numpy as np

from framework.replay import kernels
from framework.replay.kernels import SHIFT

FANOUT = 1 << SHIFT
# The root level is not a tree but one array, searched through its running sum: cheaper than one more level.
_ROOT = 2048


class SumTree:
    """Weights >= 0 of the leaves 0, 1, …; those never set weigh 0. It grows with the largest leaf that is
    set."""

    def __init__(self, capacity: int = FANOUT):
        self._compiled = kernels.load()
        self._ones = np.ones(FANOUT)
        self._running = np.triu(np.ones((FANOUT, FANOUT)))  # block @ this = its running sums
        self._levels: list[np.ndarray] = []  # [leaves, sums of FANOUT leaves, …, root]
        self._begins = np.zeros(0, np.int64)
        self._build(np.zeros(capacity))

    def _build(self, leaves: np.ndarray) -> None:
        sizes = [max(1, -(-len(leaves) // FANOUT)) * FANOUT]
        while sizes[-1] > _ROOT:
            sizes.append(-(-sizes[-1] // FANOUT**2) * FANOUT)
        # All levels in one array, for the compiled loops; the levels are views of it.
        self._starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        self._flat = np.zeros(sum(sizes))
        self._levels = [
            self._flat[begin : begin + size] for begin, size in zip(self._starts, sizes, strict=True)
        ]
        self._levels[0][: len(leaves)] = leaves
        for below, above in zip(self._levels[:-1], self._levels[1:], strict=True):
            sums = below.reshape(-1, FANOUT) @ self._ones
            above[: len(sums)] = sums
        self._sums = np.zeros(sizes[-1])  # running, of the highest level; to be computed anew if stale
        self._stale = True

    def __len__(self) -> int:
        return len(self._levels[0])

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._root_sums()[-1])

    def _root_sums(self) -> np.ndarray:
        if self._stale:
            if self._compiled is None:
                self._levels[-1].cumsum(out=self._sums)
            else:
                self._compiled.running_sum(self._levels[-1], self._sums)
            self._stale = False
        return self._sums

    def get(self, leaves: np.ndarray) -> np.ndarray:
        """The weights of ``leaves``."""
        return self._levels[0].take(leaves)

    def set(self, leaves: np.ndarray, weights: np.ndarray) -> None:
        """Sets the weights of ``leaves``; of a leaf that is there twice the last one holds."""
        if not len(leaves):
            return
        self._stale = True
        if self._compiled is not None and self._compiled.tree_set(self._flat, self._starts, leaves, weights):
            return
        highest = int(np.maximum.reduce(leaves))
        if highest >= len(self._levels[0]):
            old = self._levels[0]
            grown = np.zeros(max(highest + 1, 2 * len(old)))
            grown[: len(old)] = old
            grown[leaves] = weights
            self._build(grown)
            return
        self._levels[0][leaves] = weights
        nodes = leaves
        for below, above in zip(self._levels[:-1], self._levels[1:], strict=True):
            nodes = nodes >> SHIFT
            above[nodes] = below.reshape(-1, FANOUT).take(nodes, 0) @ self._ones

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """``n`` independent leaves in proportion to their weights, and their probabilities. The total must be
        > 0."""
        total = self.total
        mass = rng.random(n)
        mass *= total
        leaves, weights, empty = self._descend(mass)
        while empty:
            # Rounding can end a descent just past the last child that weighs anything. Leaves of weight 0
            # must not be chosen.
            again = np.flatnonzero(weights == 0.0)
            leaves[again], weights[again], empty = self._descend(rng.random(len(again)) * total)
        weights /= total
        return leaves, weights

    def _descend(self, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
        """The leaf in whose share of the running sum each of ``mass`` falls, its weight, and whether one of
        the weights is 0."""
        sums = self._root_sums()
        if self._compiled is not None:
            leaves, weights = np.empty(len(mass), np.int64), np.empty(len(mass))
            descend = self._compiled.tree_descend
            return leaves, weights, descend(self._flat, self._starts, sums, mass, leaves, weights) > 0
        order = mass.argsort()  # a search for ascending values is twice as fast, sorting included
        mass = mass.take(order)
        nodes = sums.searchsorted(mass, side="right")
        if len(self._begins) < len(mass):
            self._begins = np.arange(0, FANOUT * len(mass), FANOUT)
        begins = self._begins[: len(mass)]
        above, blocks = self._levels[-1], sums
        at = nodes
        for level in reversed(self._levels[:-1]):
            # What lies before the chosen node: the running sum up to and with it, less itself.
            mass = mass - blocks.take(at, mode="clip")
            mass += above.take(nodes, mode="clip")
            blocks = level.reshape(-1, FANOUT).take(nodes, 0, mode="clip") @ self._running
            # The first child whose running sum is above; 0 if none is, by rounding, which the caller looks
            # after.
            at = (blocks <= mass[:, None]).argmin(1)
            nodes *= FANOUT
            nodes += at
            at += begins
            above = level
        leaves = np.empty_like(nodes)
        leaves[order] = np.minimum(nodes, len(above) - 1, out=nodes)
        weights = above.take(leaves)
        return leaves, weights, not np.minimum.reduce(weights) > 0.0
