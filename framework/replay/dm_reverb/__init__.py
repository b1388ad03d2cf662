"""dm-reverb as the server behind our tables, adders, datasets and agents.

::

    from framework import adders, datasets, replay
    from framework.replay import dm_reverb

    server = dm_reverb.Server([replay.Table(...)])
    client = server.localhost_client()            # or dm_reverb.Client("localhost:8000"), from anywhere
    adder = adders.NStepTransitionAdder(client, n_step=5, discount=0.99)
    dataset = datasets.Dataset(client, "replay", batch_size=256)

`launch.ReplayNode(tables_fn, backend="framework.replay.dm_reverb")` runs a program on it. What dm-reverb
cannot do is listed in `docs/deepmind.md`; in short: keys of new items are not told, batches fetched ahead
count as sampled when they are drawn, the largest priority is that of this client, waiting readers look every
few milliseconds, and its connections are neither encrypted nor authenticated.

Needs dm-reverb (0.7.2 and 0.14.0 are tested) and the TensorFlow that fits it.
"""

from framework.replay.dm_reverb.client import Client
from framework.replay.dm_reverb.server import (
    Server,
    connect_node,
    native_checkpointer,
    native_tables,
    serve_node,
)

__all__ = ["Client", "Server", "connect_node", "native_checkpointer", "native_tables", "serve_node"]
