"""Ray started on a busy machine: it gives its own processes 30 s, and no setting of it changes that."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_ATTEMPTS = 5
_SMALL = {"num_cpus": 4, "object_store_memory": 100 << 20}


def started(start: Callable[[], T], clean: Callable[[], object] = lambda: None) -> T:
    """Returns `start()`. If Ray gave up waiting for its own processes, calls `clean` and tries again."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            clean()
    return start()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RealMachines:
    """The machines of a cluster of the real Ray."""

    def __init__(self):
        import ray
        from ray.cluster_utils import Cluster

        ray.shutdown()  # The cluster of other files.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        head = {**_SMALL, "include_dashboard": False, "resources": {"head": 10}}
        self._cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
        self._nodes = {}
        ray.init(address=self._cluster.address)
        self.head = ray.nodes()[0]["NodeID"]

    def add(self, **resources):
        node = started(lambda: self._cluster.add_node(resources=resources, **_SMALL))
        self._nodes[node.node_id] = node
        return node.node_id

    def lose(self, name):
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def close(self):
        import ray

        ray.shutdown()
        self._cluster.shutdown()
