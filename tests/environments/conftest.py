"""A port for environments that wait for others."""

import socket

import pytest


@pytest.fixture
def port():
    """Stays free for listeners with SO_REUSEPORT: a socket that does not listen holds it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
