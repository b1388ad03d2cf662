"""A table to which an adder writes, and its items in order."""

import tree

from framework import adders, replay

TABLE = adders.REPLAY_TABLE


def make_client(size=10_000):
    return replay.EmbeddedClient([replay.Table.queue(TABLE, size)])


def drain(client):
    """All items in the order in which they were written, without padding."""
    for writer in client._writers:
        if writer._before_read is not None:
            writer._before_read(wait=True)  # a read does not wait for the late thread, which may be inside
    items = []
    while client.can_sample(TABLE, 1):
        sample = client.sample_batch(TABLE, 1, timeout=0, pad=True)
        lengths = getattr(sample, "lengths", None)
        if lengths is None:
            items.append(tree.map_structure(lambda x: x[0], sample.data))
        else:
            items.append(
                tree.map_structure(lambda x, n: x[0] if n is None else x[0, : n[0]], sample.data, lengths)
            )
    return items
