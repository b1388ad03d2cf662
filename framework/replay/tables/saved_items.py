"""A table in a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from framework.replay.errors import CheckpointError
from framework.replay.rows.layout import Binding, Layout
from framework.replay.tables.items import FREE, LIVE, SPENT
from framework.replay.tables.table import Table

# The arrays and numbers of `Items` that a checkpoint holds.
_SAVED = ("state", "keys", "priorities", "times", "stamps", "layouts", "episodes", "index", "lengths")
_COUNTS = ("max_priority", "sampled_age", "stamp", "num_unique_deleted", "num_deleted_episodes")

# The binding, the slots and the index lines of the items of one layout.
SavedPart = tuple[Binding, np.ndarray, np.ndarray]


def options_of(table: Table) -> dict[str, Any]:
    """Returns what a table was made with, as numbers, strings and dicts."""
    return {
        "sampler": table.sampler.config(),
        "remover": table.remover.config(),
        "max_size": table.max_size,
        "max_times_sampled": table.max_times_sampled,
        "rate_limiter": table.rate_limiter.options(),
    }


def save_table(table: Table) -> tuple[dict[str, Any], dict[str, np.ndarray], list[SavedPart]]:
    """Returns numbers and copies of arrays, from which `restore_table` continues in exactly the same way.

    The third result has the rows of the items: one `(binding, slots, index)` for each layout that has
    any. Samples count when they are drawn, so items that had their last turn are left out. The caller holds
    the table's lock.
    """
    if table.waiting.change.open:
        table.waiting.check_open()
    items = table.items
    arrays = {name: getattr(items, name)[: items.num_used].copy() for name in _SAVED}
    arrays["layouts"] = arrays["layouts"].sum(1)
    left = np.flatnonzero(arrays["state"] > LIVE)
    arrays["state"][left] = FREE
    arrays["keys"][left] = 0
    arrays["free"] = np.concatenate([items.free[: items.num_free], left])
    for role, selector in (("sampler", items.sampler), ("remover", items.remover)):
        order = selector.order()
        if order is not None:
            arrays[f"{role}.slots"] = order
    numbers = {
        "name": table.name,
        "config": options_of(table),
        "limiter": [table.rate_limiter.inserts, table.rate_limiter.samples],
        **{name: getattr(items, name) for name in _COUNTS},
        "num_unique_deleted": items.num_unique_deleted + int(np.count_nonzero(items.state == SPENT)),
        "rng": items.rng.bit_generator.state,
        "layouts": [binding.layout.to_wire() for binding in items.bindings.known],
    }
    parts = []
    for number, binding in enumerate(items.bindings.known):
        slots = np.flatnonzero((arrays["state"] == LIVE) & (arrays["layouts"] == number))
        if len(slots):
            parts.append((binding, slots, arrays["index"][slots, : binding.width]))
    return numbers, arrays, parts


def restore_table(
    table: Table, numbers: dict[str, Any], arrays: dict[str, np.ndarray], rows: dict[str, np.ndarray]
) -> None:
    """Fills an empty table; the streams of its layouts exist.

    Args:
      table: has its own options. Its selectors keep their order only if they are the checkpoint's.
      numbers, arrays: what `save_table` has returned, but with `arrays["index"]` as positions in `rows`.
      rows: the new rows of each stream, by its name.
    """
    if len(table):
        raise CheckpointError(
            f"table {table.name!r}: got a table that holds items, expected an empty one. Restore into new "
            "tables."
        )
    options, saved = options_of(table), numbers["config"]
    with table.lock, table.waiting.change:
        table.empty()
        items = table.items
        used, live = len(arrays["state"]), arrays["state"] == LIVE
        if arrays["episodes"].ndim == 1:  # in earlier versions
            arrays["episodes"] = arrays["episodes"][:, None]
        items.grow(max(used, len(items.state)))  # which the selectors of an empty table have room for
        items.widen(**{name: arrays[name].shape[1] for name in ("index", "lengths", "episodes")})
        for name in _SAVED:
            if name != "layouts":
                getattr(items, name)[:used] = arrays[name]
        items.done[:] = items.times
        items.num_used, items.free, items.num_free = used, arrays["free"], len(arrays["free"])
        items.limiter.size = int(np.count_nonzero(live))
        # Layouts without items are left out: their streams may not be in the checkpoint.
        for number in np.unique(arrays["layouts"][live]).tolist():
            own = items.bindings[Layout.from_wire(numbers["layouts"][number])]
            binding = items.bindings.known[own]
            slots = np.flatnonzero(live & (arrays["layouts"] == number))
            items.widen(layouts=int(own > 0))
            if own:
                items.layouts[slots] = own
            for stream, begin, end in binding.parts:
                items.index[slots, begin:end] = rows[stream.name][arrays["index"][slots, begin:end]]
            binding.acquire(items.index[slots, : binding.width])
        slots = items.in_order()
        for role, selector in (("sampler", items.sampler), ("remover", items.remover)):
            try:
                if len(slots):
                    selector.check(items.priorities[slots])
            except ValueError as error:  # They were written with another exponent.
                raise CheckpointError(f"{role}: {error}") from error
            order = arrays.get(f"{role}.slots", slots) if options[role] == saved[role] else slots
            if not np.array_equal(np.sort(order), np.sort(slots)):
                raise CheckpointError(f"{role}: got an order of items that are not the table's.")
            selector.insert(order, items.priorities[order], items.stamps)
        items.rng.bit_generator.state = numbers["rng"]
        for name in _COUNTS:
            setattr(items, name, numbers[name])
        names, counts = np.unique(items.episodes[slots], return_counts=True)
        items.episode_sizes = dict(zip(names.tolist(), counts.tolist(), strict=True))
        items.episode_sizes.pop(0, None)  # items without one
        # The table may be smaller than it was. Items that all have to be sampled stay: the limiter of a queue
        # counts them, and takes no insert until there is room.
        if items.max_times_sampled != 1:
            items.trim()
        table.rate_limiter.inserts, table.rate_limiter.samples = numbers["limiter"]
