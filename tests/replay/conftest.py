"""The ways to a served replay."""

import pytest

from framework import replay
from framework.replay.remote.client import ServedClient
from launch.rpc import sockets

KEYS = sockets.CurveKeys.generate()
WAYS = ["embedded", "local", "remote", "curve"]


@pytest.fixture(params=WAYS)
def connect(request):
    """Serves tables and returns a client that comes in one of the ways."""
    made = []

    def build(*tables, **kwargs):
        way = request.param
        keys = KEYS if way == "curve" else None
        server = replay.Server(tables, curve=keys, **kwargs)
        made.append(server)
        if way == "embedded":
            client = server.localhost_client()
        else:
            client = ServedClient(server.address, keys, local=way == "local", reconnect_timeout=10)
        client.server, client.keys = server, keys
        made.append(client)
        return client

    yield build
    for each in reversed(made):
        each.close() if hasattr(each, "close") else each.stop()
