"""The ways to a served replay."""

import pytest
from forked import Forked
from served_table import WAYS, connections


@pytest.fixture(params=WAYS)
def connect(request):
    """Serves tables and returns a client that comes in one of the ways."""
    with connections(request.param) as build:
        yield build


@pytest.fixture
def fork():
    """Forks children that are killed at the end."""
    children = []

    def start(function, *args):
        children.append(Forked(function, *args))
        return children[-1]

    yield start
    for child in children:
        child.kill()
