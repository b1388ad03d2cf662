"""The sum tree of prioritized sampling: leaves drawn in proportion to their weights."""

from __future__ import annotations

import numpy as np

from framework.replay.rows.allocator import zeros

# Children of a node.
_SHIFT = 4
_FANOUT = 1 << _SHIFT
# The highest level is one array, searched through its running sum: cheaper than one more level.
_HIGHEST = 2048
_ONES = np.ones(_FANOUT)
# numpy takes several times longer to convert a scalar.
_TIMES, _BY = np.array(_FANOUT), np.array(_SHIFT)
_RUNNING = np.triu(np.ones((_FANOUT, _FANOUT)))  # block @ this = its running sums


class SumTree:
    """Weights >= 0 of the leaves 0, 1, …; a leaf that was never set weighs 0. The tree grows with its leaves.

    Each node is the sum of `_FANOUT` nodes of the level below. Every sum is computed from the children, never
    by adding differences, so that it does not drift. The weights are float64, because in float32 the sum of a
    few million weights of very different sizes would be off by more than one of the small ones.

    Attributes:
      levels: float64, the levels, leaves first.
      blocks: the levels except the highest as `[nodes above, _FANOUT]`.
    """

    def __init__(self, capacity: int = _FANOUT):
        self._build(capacity)

    def _build(self, capacity: int) -> None:
        sizes = [-(-capacity // _FANOUT) * _FANOUT]
        while sizes[-1] > _HIGHEST:
            sizes.append(-(-sizes[-1] // _FANOUT**2) * _FANOUT)
        self.levels = [zeros((size,), np.dtype(np.float64), huge=True) for size in sizes]
        self.blocks = [level.reshape(-1, _FANOUT) for level in self.levels[:-1]]
        self._sums: np.ndarray | None = None

    def _running_sums(self) -> np.ndarray:
        """Returns the running sums of the highest level."""
        if self._sums is None:  # a weight was changed
            self._sums = self.levels[-1].cumsum()
        return self._sums

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._running_sums()[-1])

    def set(self, leaves: np.ndarray, weights: np.ndarray) -> None:
        """Sets the weights of `leaves`, in order."""
        if not len(leaves):
            return
        highest, old = int(np.maximum.reduce(leaves)), self.levels[0]
        if highest >= len(old):
            self._build(max(highest + 1, 2 * len(old)))
            self.levels[0][: len(old)] = old
            for below, above in zip(self.blocks, self.levels[1:], strict=True):
                above[: len(below)] = below @ _ONES
        self._sums = None
        self.levels[0][leaves] = weights
        nodes = leaves
        for below, above in zip(self.blocks, self.levels[1:], strict=True):
            nodes = nodes >> _BY
            above[nodes] = below.take(nodes, 0) @ _ONES

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns `n` independent leaves in proportion to their weights, and their probabilities.

        The total must be > 0.
        """
        sums = self._running_sums()
        total = np.array(sums[-1])
        leaves, weights = self._descend(sums, rng.random(n) * total)
        while np.count_nonzero(weights) < len(weights):
            # Rounding can end a descent just past the last child that weighs anything: draw those again.
            again = np.flatnonzero(weights == 0.0)
            mass = rng.random(len(again)) * total
            leaves[again], weights[again] = self._descend(sums, mass)
        weights /= total
        return leaves, weights

    def _descend(self, sums: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the leaf in whose share of the running sum each of `mass` falls, and its weight.

        `sums` are the running sums of the highest level. Rounding can end a descent at a leaf of weight 0.
        """
        order = mass.argsort()  # a search for ascending values is twice as fast, sorting included
        mass = mass.take(order)
        nodes = sums.searchsorted(mass, side="right")
        begins = np.arange(0, _FANOUT * len(mass), _FANOUT)
        above, running, at = self.levels[-1], sums, nodes
        for level in range(len(self.blocks) - 1, -1, -1):
            # What lies before the chosen node: the running sum up to and with it, less itself.
            mass = mass - running.take(at, mode="clip")
            mass += above.take(nodes, mode="clip")
            above = self.levels[level]
            running = self.blocks[level].take(nodes, 0, mode="clip") @ _RUNNING
            # The first child whose running sum is above; 0 if none is, by rounding.
            at = (running <= mass[:, None]).argmin(1)
            nodes *= _TIMES
            nodes += at
            at += begins
        leaves = np.empty_like(nodes)
        leaves[order] = np.minimum(nodes, np.array(len(above) - 1), out=nodes)
        return leaves, above.take(leaves)
