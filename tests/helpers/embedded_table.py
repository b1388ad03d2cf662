"""One embedded table ``t`` of integers ``x`` in stream ``s``, for tests."""

import itertools

import numpy as np

from framework import replay
from framework.replay import rate_limiters as rl
from framework.replay import selectors
from framework.replay.rows.layout import LayoutBuilder
from framework.replay.writers import NewItems


def make(sampler=None, remover=None, size=100, limiter=None, times=0, **options):
    sampler, remover = sampler or selectors.Uniform(), remover or selectors.Fifo()
    seed, signature = options.pop("seed", 0), options.pop("signature", None)
    limiter = limiter or rl.MinSize(1)
    table = replay.Table("t", sampler, remover, size, limiter, times, seed=seed, signature=signature)
    table.waiting.look_s = 60.0  # A call that is not woken does not look again while a test waits for it.
    return replay.EmbeddedClient([table], **options)


def insert(client, values, priorities=None, table="t", timeout=0, writer=None):
    writer = writer or client.batch_writer()
    values = np.asarray(values, np.int64)
    rows = writer.append("s", {"x": values})
    keys = writer.create_items(table, writer.slice("s", "x", rows), priorities)
    writer.release("s", rows)
    writer.flush(timeout)
    return keys


_keys = itertools.count(1, 1000)


def insert_now(table, leaf):
    """Past the queue of any writer: the keys of the items, and how many of them the limiter let through."""
    layout, index, _ = LayoutBuilder().build(leaf)
    items = NewItems(index, np.arange(len(index), dtype=np.uint64) + np.uint64(next(_keys)))
    table.check_items(layout, items)
    return items.keys, table.insert_now(items)


def drain(client, n):
    return [int(client.sample_batch("t", 1, timeout=0).data[0]) for _ in range(n)]


def contents(client):
    """The values in the table, oldest first, without touching it."""
    table = client.tables["t"]
    items = table.items
    return client.store.streams["s"].columns["x"][items.index[items.in_order(), 0]].tolist()
