"""A table, the ways to reach it, and what writes to it, for tests of a served replay."""

import contextlib

import numpy as np

from framework import replay
from framework.replay.client import ServedClient
from launch.rpc import sockets

KEYS = sockets.CurveKeys.generate()
WAYS = ["embedded", "local", "remote", "curve"]


@contextlib.contextmanager
def connections(way):
    """Yields what serves tables and returns a client that comes in this way; closes all of them."""
    with contextlib.ExitStack() as stack:

        def build(*tables, **options):
            keys = KEYS if way == "curve" else None
            server = stack.enter_context(replay.Server(tables, curve=keys, **options))
            if way == "embedded":
                client = server.localhost_client()
            else:
                client = ServedClient(server.address, keys, local=way == "local", reconnect_timeout=10)
                stack.callback(client.close)
            client.server, client.keys = server, keys
            return client

        yield build


def table(name="t", size=1000, limiter=None, sampler=None, **options):
    limiter = limiter or replay.rate_limiters.MinSize(1)
    sampler = sampler or replay.selectors.Uniform()
    return replay.Table(name, sampler, replay.selectors.Fifo(), size, limiter, seed=1, **options)


def write(writer, n, table="t", start=0, priorities=None):
    """Inserts ``n`` items of numbers ``x`` from ``start`` on and vectors ``y``; the keys of the items."""
    return write_columns(
        writer, {"x": np.arange(start, start + n), "y": np.ones((n, 3), np.float32)}, table, priorities
    )


def write_columns(writer, columns, table="t", priorities=None):
    rows = writer.append("s", columns)
    keys = writer.create_items(table, {name: writer.slice("s", name, rows) for name in columns}, priorities)
    writer.release("s", rows)
    return keys


def counts(client, table="t"):
    """How many inserts and samples the limiter has counted."""
    limiter = client.server_info()[table].rate_limiter_info
    return limiter.insert_stats.completed, limiter.sample_stats.completed


def num_rows(client_or_store):
    store = getattr(client_or_store, "store", client_or_store)
    return sum(stream.num_rows for stream in store.streams.values())
