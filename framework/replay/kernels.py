"""Loops over a request's items, compiled by numba where it is installed (extra ``fast``).

What numpy does in ten calls over 256 numbers costs mostly the calls. Everything works without numba; results
are the same but for the order in which sums of weights are added up, which is the rounding of the last digit.
``REPERTORY_COMPILED=0`` in the environment does without in any case.

::

    compiled = kernels.load()          # None without numba
    if compiled is not None:
        compiled.tree_set(flat, starts, leaves, weights)

The functions here are plain Python; ``load`` compiles them, for the types in ``_signatures`` only, and numba
keeps the result in its cache for later processes.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import types
from typing import Any

#: Children of a node of the sum tree: 2 ** SHIFT.
SHIFT = 4


def tree_set(flat: Any, starts: Any, leaves: Any, weights: Any) -> bool:
    """Sets ``leaves`` in order and computes the sums above them anew; level l begins at ``starts[l]``. False,
    and nothing done, if the tree is too small for one of them."""
    size = starts[1] if len(starts) > 1 else len(flat)
    for leaf in leaves:
        if leaf >= size:
            return False
    for at in range(len(leaves)):
        flat[leaves[at]] = weights[at]
    for level in range(1, len(starts)):
        below, above, shift = starts[level - 1], starts[level], SHIFT * level
        last = -1
        for at in range(len(leaves)):
            node = leaves[at] >> shift
            if node != last:
                first = below + (node << SHIFT)
                total = 0.0
                for child in range(first, first + (1 << SHIFT)):
                    total += flat[child]
                flat[above + node] = total
                last = node
    return True


def running_sum(values: Any, out: Any) -> None:
    """``out[i]`` is the sum of ``values[: i + 1]``."""
    total = 0.0
    for at in range(len(values)):
        total += values[at]
        out[at] = total


def tree_descend(flat: Any, starts: Any, root: Any, mass: Any, leaves: Any, weights: Any) -> int:
    """The leaf in whose share of the running sum each of ``mass`` falls, and its weight; ``root`` holds the
    running sums of the highest level. How many leaves of weight 0 came out, by rounding."""
    # One level after another for all of them, without branches: the reads of several overlap.
    for at in range(len(mass)):
        node, size = 0, len(root)
        while size > 1:
            half = size >> 1
            node += half * (root[node + half - 1] <= mass[at])
            size -= half
        leaves[at] = node
        weights[at] = mass[at] - (root[node - 1] if node > 0 else 0.0)
    for level in range(len(starts) - 2, -1, -1):
        begin = starts[level]
        # Past the last that weighs anything, by rounding, there may be nodes without children.
        highest = ((starts[level + 1] - begin) >> SHIFT) - 1
        for at in range(len(mass)):
            node = min(leaves[at], highest)
            first = begin + (node << SHIFT)
            chosen, running, before = 0, 0.0, 0.0
            for child in range(first, first + (1 << SHIFT) - 1):
                running += flat[child]
                after = running <= weights[at]
                chosen += after
                before = running if after else before
            weights[at] -= before
            leaves[at] = (node << SHIFT) + chosen
    empty = 0
    for at in range(len(mass)):
        weights[at] = flat[leaves[at]]
        empty += not weights[at] > 0.0
    return empty


def draw(slots: Any, times: Any, keys: Any, priorities: Any, out_times: Any, out_keys: Any, out: Any) -> None:
    """Counts one more sample of each slot and copies what a sample says of it; ``out`` are priorities."""
    for at in range(len(slots)):
        slot = slots[at]
        times[slot] += 1
        out_times[at] = times[slot]
        out_keys[at] = keys[slot]
        out[at] = priorities[slot]


def sum_at(values: Any, places: Any) -> int:
    """The sum of ``values`` at ``places``."""
    total = 0
    for place in places:
        total += values[place]
    return total


def find(wanted: Any, keys: Any, mask: Any, slots: Any) -> int:
    """The slot of each key, -1 for those that are not where their number says; how many are not."""
    missing = 0
    for at in range(len(wanted)):
        slot = wanted[at] & mask
        if slot < len(keys) and keys[slot] == wanted[at]:
            slots[at] = slot
        else:
            slots[at] = -1
            missing += 1
    return missing


def bounds(values: Any) -> tuple[float, float]:
    """The smallest and the largest; two NaN if one is NaN."""
    low, high = math.inf, -math.inf
    for value in values:
        if math.isnan(value):
            return value, value
        low = min(low, value)
        high = max(high, value)
    return low, high


def acquire(counts: Any, rows: Any) -> bool:
    """One more for each row; False, and nothing done, if one is out of range."""
    for row in rows:
        if row < 0 or row >= len(counts):
            return False
    for row in rows:
        counts[row] += 1
    return True


def drop(counts: Any, rows: Any, free: Any) -> int:
    """One less for each row; those that come to 0 into ``free``. How many; -1 - that if they do not ascend.

    ``-len(rows) - 2``, and nothing done, if a row is out of range.
    """
    for row in rows:
        if row < 0 or row >= len(counts):
            return -len(rows) - 2
    n, last, ascending = 0, -1, True
    for row in rows:
        counts[row] -= 1
        if counts[row] == 0:
            free[n] = row
            n += 1
            ascending = ascending and row > last
            last = row
    return n if ascending else -1 - n


def consecutive(rows: Any) -> bool:
    """Whether each is the one before plus 1."""
    same = True
    for at in range(1, len(rows)):
        same = same and rows[at] == rows[at - 1] + 1
    return same


def let_go(held: Any, rows: Any) -> bool:
    """Clears ``held`` of each row; False, and nothing done, if one is not set or out of range."""
    for row in rows:
        if row < 0 or row >= len(held) or not held[row]:
            return False
    for row in rows:
        held[row] = False
    return True


def _signatures(t: Any) -> dict[str, Any]:
    """What each function takes; ``t`` is ``numba.types``. Inputs may be of any layout and read-only, as what
    came with a message is; what belongs to a table is contiguous."""

    def given(kind: Any) -> Any:
        return t.Array(kind, 1, "A", readonly=True)

    def own(kind: Any) -> Any:
        return t.Array(kind, 1, "C")

    i8, i4, u8, f8 = t.int64, t.int32, t.uint64, t.float64
    return {
        "tree_set": t.boolean(own(f8), own(i8), given(i8), given(f8)),
        "running_sum": t.void(own(f8), own(f8)),
        "tree_descend": i8(own(f8), own(i8), own(f8), own(f8), own(i8), own(f8)),
        "draw": t.void(given(i8), own(i4), own(u8), own(f8), own(i4), own(u8), own(f8)),
        "sum_at": i8(own(i8), given(i8)),
        "find": i8(given(u8), own(u8), u8, own(i8)),
        "bounds": t.UniTuple(f8, 2)(given(f8)),
        "acquire": t.boolean(own(i4), given(i8)),
        "drop": i8(own(i4), given(i8), own(i8)),
        "consecutive": t.boolean(given(i8)),
        "let_go": t.boolean(own(t.boolean), given(i8)),
    }


@functools.lru_cache(maxsize=1)
def load() -> Any:
    """The compiled functions by their names here, or None. The first time on a machine takes some seconds.

    Raises:
      RuntimeError: ``REPERTORY_COMPILED=1`` asks for numba and it is not there.
    """
    asked = os.environ.get("REPERTORY_COMPILED", "")
    if asked == "0":
        return None
    try:
        import numba
    except ImportError as error:  # not installed, or too old for the numpy that is here
        if asked == "1":
            raise RuntimeError(
                f"REPERTORY_COMPILED=1 asks for numba, which does not load: {error}; install the extra 'fast'"
            ) from error
        return None
    signatures = _signatures(numba.types)
    try:
        return _compile(numba, signatures, cache=True)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        logging.getLogger(__name__).warning(
            "no place to keep compiled functions, so each process compiles them for some seconds; set "
            "NUMBA_CACHE_DIR to a folder that can be written, or REPERTORY_COMPILED=0 (%s)",
            error,
        )
        return _compile(numba, signatures, cache=False)


def _compile(numba: Any, signatures: dict[str, Any], cache: bool) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        **{
            name: numba.njit(signature, cache=cache)(globals()[name])
            for name, signature in signatures.items()
        }
    )
