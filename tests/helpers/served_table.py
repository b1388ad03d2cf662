"""A table, and what writes to it, for tests of a served replay."""

import numpy as np

from framework import replay


def table(name="t", size=1000, limiter=None, sampler=None, **kwargs):
    return replay.Table(
        name,
        sampler or replay.selectors.Uniform(),
        replay.selectors.Fifo(),
        size,
        limiter or replay.rate_limiters.MinSize(1),
        seed=1,
        **kwargs,
    )


def write(writer, n, table="t", start=0, priorities=None):
    columns = {"x": np.arange(start, start + n), "y": np.ones((n, 3), np.float32)}
    rows = writer.append("s", columns)
    keys = writer.create_items(table, {name: writer.slice("s", name, rows) for name in columns}, priorities)
    writer.release("s", rows)
    return keys


def finish(thread_or_result, timeout=10):
    thread_or_result.join(timeout)
    assert not thread_or_result.is_alive()
