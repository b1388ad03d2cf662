"""Snapshots of tables, and tables from snapshots. ``checkpointers`` writes them to files.

Samples count when they are drawn, so items that have no turn left are not in a snapshot.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from framework.replay.errors import CheckpointError
from framework.replay.rows.binding import Binding
from framework.replay.rows.layout import Layout
from framework.replay.tables import selectors
from framework.replay.tables.items import FREE, NO_KEY, SPENT, Items
from framework.replay.tables.rate_limiters import RateLimiter
from framework.replay.tables.selectors import Selector
from framework.replay.tables.table import Table

_LOG = logging.getLogger(__name__)
_SELECTORS = ("Uniform", "Fifo", "Lifo", "MinHeap", "MaxHeap", "Prioritized")
_ARRAYS = ("state", "keys", "next_keys", "priorities", "times", "stamps", "layouts", "index")

Arrays = dict[str, np.ndarray]


def config(table: Table) -> dict[str, Any]:
    """What the table was made with, as numbers, strings and dicts."""
    return {
        "sampler": _selector_config(table.sampler),
        "remover": _selector_config(table.remover),
        "max_size": table.max_size,
        "max_times_sampled": table.max_times_sampled,
        "rate_limiter": table.rate_limiter.options(),
    }


def _selector_config(selector: Selector) -> dict[str, Any]:
    return {"kind": type(selector).__name__, **selector.options()}


def snapshot(table: Table) -> tuple[dict[str, Any], Arrays]:
    """``(numbers and strings, arrays)`` of a table whose lock the caller holds."""
    items, limiter = table._items, table.rate_limiter
    used = items._next
    arrays: Arrays = {name: getattr(items, name)[:used].copy() for name in _ARRAYS}
    spent = np.flatnonzero(arrays["state"] == SPENT)
    arrays["state"][spent] = FREE
    arrays["keys"][spent] = NO_KEY
    arrays["free"] = np.concatenate([items._free[: items._num_free], spent])
    for name in ("lengths", "episodes"):
        array = getattr(items, name)
        if array is not None:
            arrays[name] = array[:used].copy()
    for role, selector in (("sampler", table.sampler), ("remover", table.remover)):
        for name, array in selector.state().items():
            arrays[f"{role}.{name}"] = array
    meta = {
        "name": table.name,
        "config": config(table),
        "limiter": [limiter.inserts, limiter.samples, limiter.deletes],
        "rng": table._rng.bit_generator.state,
        "max_priority": table.max_priority,
        "stamp": table._stamp,
        "bits": items.bits,
        "num_unique_deleted": table._num_unique_deleted + len(spent),
        "num_deleted_episodes": table._num_deleted_episodes,
        "sampled_age": table._age_sum,
        "layouts": [binding.layout.to_wire() for binding in table._bindings],
    }
    return meta, arrays


def live_parts(table: Table, arrays: Arrays) -> list[tuple[Binding, np.ndarray, np.ndarray]]:
    """``(binding, slots, index lines)`` of the items in a snapshot, one for each layout that has any."""
    parts = []
    for number, binding in enumerate(table._bindings):
        slots = np.flatnonzero((arrays["state"] != FREE) & (arrays["layouts"] == number))
        if len(slots):
            parts.append((binding, slots, arrays["index"][slots, : binding.width]))
    return parts


def restore(table: Table, meta: dict[str, Any], arrays: Arrays, from_checkpoint: bool) -> None:
    """Fills an empty table. The streams of its layouts exist and ``arrays["index"]`` holds their rows.

    Args:
      from_checkpoint: the configuration in ``meta`` wins over the table's own; differences are logged either
      way.
    """
    _configure(table, meta["config"], from_checkpoint)
    if table._items.size:
        raise CheckpointError(f"table {table.name!r}: it holds items already; restore into new tables only")
    layouts, arrays = _layouts_in_use(meta["layouts"], arrays)
    with table._lock:
        for layout in layouts:
            table._bindings.append(Binding(layout, table.store, table.name, table.signature))
            table._binding_of[layout] = len(table._bindings) - 1
        items = _items(table.max_size, meta, arrays)
        table._items = items
        for binding, _, index in live_parts(table, arrays):
            binding.acquire(index)
        slots = items.in_order()
        priorities, stamps = items.priorities[slots], items.stamps[slots]
        for role, selector in (("sampler", table.sampler), ("remover", table.remover)):
            state = {}
            if _selector_config(selector) == meta["config"][role]:
                begin = f"{role}."
                state = {name[len(begin) :]: a for name, a in arrays.items() if name.startswith(begin)}
            selector.restore(slots, priorities, stamps, state)
        limiter = table.rate_limiter
        limiter.inserts, limiter.samples, limiter.deletes = meta["limiter"]
        table._rng.bit_generator.state = meta["rng"]
        table.max_priority = meta["max_priority"]
        table._stamp = meta["stamp"]
        table._num_unique_deleted = meta["num_unique_deleted"]
        table._num_deleted_episodes = meta["num_deleted_episodes"]
        table._age_sum = meta.get("sampled_age", 0)  # checkpoints of earlier versions lack it
        if items.episodes is not None:
            names, counts = np.unique(items.episodes[slots], return_counts=True)
            table._episodes = dict(zip(names.tolist(), counts.tolist(), strict=True))
            table._episodes.pop(0, None)  # items that named none
        while items.size > table.max_size:  # a smaller table than before
            table._remove(table.remover.sample(1, table._rng)[0])


def _layouts_in_use(saved: list[Any], arrays: Arrays) -> tuple[list[Layout], Arrays]:
    """The layouts that items have, and the arrays with their numbers anew.

    Others must not be looked at: their streams may hold nothing and then are not in the checkpoint. They
    come back with the next item that has them.
    """
    live = arrays["state"] != FREE
    used = np.unique(arrays["layouts"][live])
    numbers = np.zeros_like(arrays["layouts"])
    numbers[live] = used.searchsorted(arrays["layouts"][live])
    return [Layout.from_wire(saved[number]) for number in used], {**arrays, "layouts": numbers}


def _items(max_size: int, meta: dict[str, Any], arrays: Arrays) -> Items:
    items = Items(max_size, arrays["index"].shape[1])
    used = len(arrays["state"])
    items._next = used
    items._grow(max(used, 1))
    for name in ("state", "keys", "priorities", "times", "stamps", "layouts", "index"):
        getattr(items, name)[:used] = arrays[name]
    items._num_free = len(arrays["free"])
    items._free[: items._num_free] = arrays["free"]
    for name in ("lengths", "episodes"):
        if name in arrays:
            array = np.zeros((len(items.state), *arrays[name].shape[1:]), arrays[name].dtype)
            array[:used] = arrays[name]
            setattr(items, name, array)
    slots = np.flatnonzero(arrays["state"] != FREE)
    keys = arrays["keys"][slots]
    native = (keys & items._mask) == slots.astype(np.uint64)
    if meta["bits"] == items.bits:
        items.next_keys[:used] = arrays["next_keys"]
    else:  # another max_size, so keys are put together in another way: older ones are looked up in the dict
        native[:] = False
        highest = int(arrays["next_keys"].max()) if used else 0
        items.next_keys += np.uint64(((highest >> items.bits) + 1) << items.bits)
    items.foreign = dict(zip(keys[~native].tolist(), slots[~native].tolist(), strict=True))
    return items


def _configure(table: Table, saved: dict[str, Any], from_checkpoint: bool) -> None:
    own = config(table)
    for name, value in saved.items():
        if own[name] != value:
            _LOG.warning(
                "table %r, %s: the checkpoint has %s, the constructor %s; %s is used",
                table.name,
                name,
                value,
                own[name],
                "the checkpoint's" if from_checkpoint else "the constructor's",
            )
    if not from_checkpoint or own == saved:
        return
    table.sampler, table.remover = _selector(saved["sampler"]), _selector(saved["remover"])
    table.sampler.owner = table.remover.owner = table.name
    table.max_size, table.max_times_sampled = int(saved["max_size"]), int(saved["max_times_sampled"])
    table.rate_limiter = RateLimiter(**saved["rate_limiter"])
    table.rate_limiter.bind(table.name)


def _selector(saved: dict[str, Any]) -> Selector:
    options = {name: value for name, value in saved.items() if name != "kind"}
    if saved["kind"] not in _SELECTORS:
        raise CheckpointError(
            f"selector: got {saved['kind']!r} in the checkpoint, expected one of {_SELECTORS}"
        )
    return getattr(selectors, saved["kind"])(**options)
