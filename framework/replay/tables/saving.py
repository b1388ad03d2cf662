"""Snapshots of tables, and tables from snapshots. `checkpointers` writes them to files."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from framework.replay.errors import CheckpointError
from framework.replay.rows.layout import Binding
from framework.replay.tables import selectors
from framework.replay.tables.items import FREE
from framework.replay.tables.rate_limiters import RateLimiter
from framework.replay.tables.selectors import Selector
from framework.replay.tables.table import Table

_LOG = logging.getLogger(__name__)
_SELECTORS = ("Uniform", "Fifo", "Lifo", "MinHeap", "MaxHeap", "Prioritized")

Arrays = dict[str, np.ndarray]


def config(table: Table) -> dict[str, Any]:
    """What the table was made with, as numbers, strings and dicts."""
    return {
        "sampler": table.sampler.config(),
        "remover": table.remover.config(),
        "max_size": table.max_size,
        "max_times_sampled": table.max_times_sampled,
        "rate_limiter": table.rate_limiter.options(),
    }


def snapshot(table: Table) -> tuple[dict[str, Any], Arrays]:
    """`(numbers and strings, arrays)` of a table whose lock the caller holds."""
    numbers, arrays = table._contents.state()
    limiter = table.rate_limiter
    limits = [limiter.inserts, limiter.samples]
    return {"name": table.name, "config": config(table), "limiter": limits, **numbers}, arrays


def live_parts(table: Table, arrays: Arrays) -> list[tuple[Binding, np.ndarray, np.ndarray]]:
    """`(binding, slots, index lines)` of the items in a snapshot, one for each layout that has any."""
    parts = []
    for number, binding in enumerate(table._bindings.known):
        slots = np.flatnonzero((arrays["state"] != FREE) & (arrays["layouts"] == number))
        if len(slots):
            parts.append((binding, slots, arrays["index"][slots, : binding.width]))
    return parts


def restore(table: Table, meta: dict[str, Any], arrays: Arrays, from_checkpoint: bool) -> None:
    """Fills an empty table. The streams of its layouts exist and `arrays["index"]` holds their rows.

    Args:
      from_checkpoint: the configuration in `meta` wins over the table's own; differences are logged either
        way.
    """
    saved, own = meta["config"], config(table)
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
    if table.size:
        raise CheckpointError(f"table {table.name!r}: it holds items already; restore into new tables only")
    with table._lock:
        if from_checkpoint and own != saved:
            table._compose(
                _selector(saved["sampler"]),
                _selector(saved["remover"]),
                int(saved["max_size"]),
                RateLimiter(**saved["rate_limiter"]),
                int(saved["max_times_sampled"]),
            )
        now = config(table)
        roles = tuple(role for role in ("sampler", "remover") if now[role] == saved[role])
        table._contents.restore(meta, arrays, roles)
        table.rate_limiter.inserts, table.rate_limiter.samples = meta["limiter"]
        table.rate_limiter.size = table.size


def _selector(saved: dict[str, Any]) -> Selector:
    options = {name: value for name, value in saved.items() if name != "kind"}
    if saved["kind"] not in _SELECTORS:
        raise CheckpointError(
            f"selector: got {saved['kind']!r} in the checkpoint, expected one of {_SELECTORS}"
        )
    return getattr(selectors, saved["kind"])(**options)
