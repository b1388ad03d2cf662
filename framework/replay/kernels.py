"""The sum tree of `Prioritized`, and its loops: numpy calls, or loops that numba compiles (extra `fast`).

`load` returns the `Kernels` of this process. What numpy does in ten calls over 256 numbers costs mostly the
calls, so compiled loops pay where a table is the bottleneck. The results are the same except for the order in
which sums of weights are added, which is the rounding of the last digit. `REPERTORY_COMPILED=0` in the
environment does without numba in any case.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

#: Children of a node of the sum tree: `2 ** SHIFT`.
SHIFT = 4
FANOUT = 1 << SHIFT

# The highest level is one array, searched through its running sum: cheaper than one more level.
_HIGHEST = 2048
_ONES = np.ones(FANOUT)
_RUNNING = np.triu(np.ones((FANOUT, FANOUT)))  # block @ this = its running sums


class SumTree:
    """Weights >= 0 of the leaves 0, 1, …; a leaf that was never set weighs 0. The tree grows with its leaves.

    Each node is the sum of `FANOUT` nodes of the level below. Every sum is computed from the children, never
    by adding differences, so that it does not drift. The weights are float64 because with float32 a few
    million weights of very different sizes do not add up to within one of the small ones.

    Attributes:
      flat: float64, all levels in one array, leaves first.
      starts: int64, where each level begins in `flat`, and the end of the last.
      levels: the levels, views of `flat`.
      blocks: the levels except the highest as `[nodes above, FANOUT]`.
    """

    def __init__(self, capacity: int = FANOUT):
        self._kernels = load()
        self._build(capacity)

    def _build(self, capacity: int) -> None:
        sizes = [-(-capacity // FANOUT) * FANOUT]
        while sizes[-1] > _HIGHEST:
            sizes.append(-(-sizes[-1] // FANOUT**2) * FANOUT)
        self.starts = np.cumsum([0, *sizes], dtype=np.int64)
        self.flat = np.zeros(self.starts[-1])
        self.levels = [self.flat[a:b] for a, b in itertools.pairwise(self.starts.tolist())]
        self.blocks = [level.reshape(-1, FANOUT) for level in self.levels[:-1]]
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
            self._kernels.tree_set(self, np.arange(len(old)), old)
        self._sums = None
        self._kernels.tree_set(self, leaves, weights)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns `n` independent leaves in proportion to their weights, and their probabilities.

        The total must be > 0.
        """
        sums = self._running_sums()
        total = float(sums[-1])
        leaves, weights = self._kernels.tree_descend(self, sums, rng.random(n) * total)
        while np.count_nonzero(weights) < len(weights):
            # Rounding can end a descent just past the last child that weighs anything: draw those again.
            again = np.flatnonzero(weights == 0.0)
            mass = rng.random(len(again)) * total
            leaves[again], weights[again] = self._kernels.tree_descend(self, sums, mass)
        weights /= total
        return leaves, weights


class Kernels:
    """The loops as numpy calls. The tests compare the compiled ones with them."""

    def tree_set(self, tree: SumTree, leaves: np.ndarray, weights: np.ndarray) -> None:
        """Sets `leaves` in order and computes the sums above them from their children."""
        tree.levels[0][leaves] = weights
        nodes = leaves
        for below, above in zip(tree.blocks, tree.levels[1:], strict=True):
            nodes = nodes >> SHIFT
            above[nodes] = below.take(nodes, 0) @ _ONES

    def tree_descend(
        self, tree: SumTree, sums: np.ndarray, mass: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the leaf in whose share of the running sum each of `mass` falls, and its weight.

        `sums` are the running sums of the highest level. Rounding can end a descent at a leaf of weight 0.
        """
        order = mass.argsort()  # a search for ascending values is twice as fast, sorting included
        mass = mass.take(order)
        nodes = sums.searchsorted(mass, side="right")
        begins = np.arange(0, FANOUT * len(mass), FANOUT)
        above, running, at = tree.levels[-1], sums, nodes
        for level in range(len(tree.blocks) - 1, -1, -1):
            # What lies before the chosen node: the running sum up to and with it, less itself.
            mass = mass - running.take(at, mode="clip")
            mass += above.take(nodes, mode="clip")
            above = tree.levels[level]
            running = tree.blocks[level].take(nodes, 0, mode="clip") @ _RUNNING
            # The first child whose running sum is above; 0 if none is, by rounding.
            at = (running <= mass[:, None]).argmin(1)
            nodes *= FANOUT
            nodes += at
            at += begins
        leaves = np.empty_like(nodes)
        leaves[order] = np.minimum(nodes, len(above) - 1, out=nodes)
        return leaves, above.take(leaves)


class CompiledKernels(Kernels):
    """The loops compiled by numba, for the types below only.

    Arguments may be read-only and of any stride, as arrays of a message are; those of a table are contiguous.
    """

    def __init__(self, compile_function: Callable[[Any, Callable[..., Any]], Callable[..., Any]], types: Any):
        def given(kind: Any) -> Any:
            return types.Array(kind, 1, "A", readonly=True)

        def own(kind: Any) -> Any:
            return types.Array(kind, 1, "C")

        i8, f8 = types.int64, types.float64
        self._tree_set = compile_function(types.void(own(f8), own(i8), given(i8), given(f8)), _tree_set)
        self._tree_descend = compile_function(
            types.void(own(f8), own(i8), own(f8), own(f8), own(i8), own(f8)), _tree_descend
        )

    def tree_set(self, tree: SumTree, leaves: np.ndarray, weights: np.ndarray) -> None:
        self._tree_set(tree.flat, tree.starts, leaves, weights)

    def tree_descend(
        self, tree: SumTree, sums: np.ndarray, mass: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        leaves, weights = np.empty(len(mass), np.int64), np.empty(len(mass))
        self._tree_descend(tree.flat, tree.starts, sums, mass, leaves, weights)
        return leaves, weights


# What is compiled.


def _tree_set(flat: Any, starts: Any, leaves: Any, weights: Any) -> None:
    for at in range(len(leaves)):
        flat[leaves[at]] = weights[at]
    for level in range(1, len(starts) - 1):
        below, above, shift = starts[level - 1], starts[level], SHIFT * level
        last = -1
        for at in range(len(leaves)):
            node = leaves[at] >> shift
            if node != last:
                first = below + (node << SHIFT)
                total = 0.0
                for child in range(first, first + FANOUT):
                    total += flat[child]
                flat[above + node] = total
                last = node


def _tree_descend(flat: Any, starts: Any, sums: Any, mass: Any, leaves: Any, weights: Any) -> None:
    # One level after another for all of them, without branches: the reads of several overlap.
    for at in range(len(mass)):
        node, size = 0, len(sums)
        while size > 1:
            half = size >> 1
            node += half * (sums[node + half - 1] <= mass[at])
            size -= half
        leaves[at] = node
        weights[at] = mass[at] - (sums[node - 1] if node > 0 else 0.0)
    for level in range(len(starts) - 3, -1, -1):
        begin = starts[level]
        # Past the last that weighs anything, by rounding, there may be nodes without children.
        highest = ((starts[level + 1] - begin) >> SHIFT) - 1
        for at in range(len(mass)):
            node = min(leaves[at], highest)
            first = begin + (node << SHIFT)
            chosen, running, before = 0, 0.0, 0.0
            for child in range(first, first + FANOUT - 1):
                running += flat[child]
                after = running <= weights[at]
                chosen += after
                before = running if after else before
            weights[at] -= before
            leaves[at] = (node << SHIFT) + chosen
    for at in range(len(mass)):
        weights[at] = flat[leaves[at]]


@functools.lru_cache(maxsize=1)
def load() -> Kernels:
    """Returns the kernels of this process. With numba, the first time on a machine takes some seconds.

    Raises:
      RuntimeError: `REPERTORY_COMPILED=1` requires numba, which does not load.
    """
    asked = os.environ.get("REPERTORY_COMPILED", "")
    if asked == "0":
        return Kernels()
    try:
        import numba
    except ImportError as error:  # not installed, or too old for this numpy
        if asked == "1":
            raise RuntimeError(
                f"REPERTORY_COMPILED=1 asks for numba, which does not load: {error}; install the extra 'fast'"
            ) from error
        return Kernels()
    try:
        return CompiledKernels(lambda signature, f: numba.njit(signature, cache=True)(f), numba.types)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        logging.getLogger(__name__).warning(
            "numba finds no folder for compiled functions, so each process compiles them for some seconds. "
            "Set NUMBA_CACHE_DIR to a folder that can be written, or REPERTORY_COMPILED=0. (%s)",
            error,
        )
        return CompiledKernels(lambda signature, f: numba.njit(signature, cache=False)(f), numba.types)
