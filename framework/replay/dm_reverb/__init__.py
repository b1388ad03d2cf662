"""dm-reverb as the replay server of this framework's tables, adders, datasets and agents.

```python
from framework import adders, datasets, replay
from framework.replay import dm_reverb

server = dm_reverb.Server([replay.Table(...)])
client = server.localhost_client()            # or dm_reverb.Client("localhost:8000"), from anywhere
adder = adders.NStepTransitionAdder(client, n_step=5, discount=0.99)
dataset = datasets.Dataset(client, "replay", batch_size=256)
```

`launch.ReplayNode(tables_fn, backend="framework.replay.dm_reverb")` runs a program on it. `docs/deepmind.md`
lists the limits of this back end. In short: `create_items` returns no keys, prefetched samples cannot be
given back to the server, the largest priority is this client's, waiting readers poll every few
milliseconds, and connections are neither encrypted nor authenticated.

Requires dm-reverb (tested with 0.7.2 and 0.14.0) and a TensorFlow that fits it.
"""

from launch import extras

try:
    import reverb as _reverb  # noqa: F401
except ImportError as error:
    raise ImportError(f"dm-reverb is not installed. Run {extras.install('reverb')}.") from error

from framework.replay.dm_reverb.client import DmReverbClient as Client
from framework.replay.dm_reverb.server import DmReverbServer as Server
from framework.replay.dm_reverb.server import connect_node, native_checkpointer, native_tables, serve_node

__all__ = ["Client", "Server", "connect_node", "native_checkpointer", "native_tables", "serve_node"]
