"""One fixture for the tests of clusters: hosts, or nodes of Ray on this host where there can be no others.

`REPERTORY_TEST_HOSTS=cluster` uses the nodes everywhere. Tests that need hosts with a network and memory of
their own ask for `real_hosts`.
"""

from __future__ import annotations

import contextlib
import os
import warnings

import pytest
from hosts import CannotMakeHosts, Hosts, OneHost, start_ray


@pytest.fixture(scope="module")
def cluster(request):
    """Hosts with Ray, as many as the module's `NUM_HOSTS` says, and the environment of a driver."""
    with contextlib.ExitStack() as ends:
        try:
            if os.environ.get("REPERTORY_TEST_HOSTS") == "cluster":
                raise CannotMakeHosts("REPERTORY_TEST_HOSTS=cluster")
            hosts = ends.enter_context(Hosts(request.module.NUM_HOSTS))
            environment = start_ray(hosts)
        except CannotMakeHosts as error:
            warnings.warn(f"Nodes of Ray on one host stand in for hosts: {error}", stacklevel=2)
            hosts = ends.enter_context(OneHost(request.module.NUM_HOSTS))
            environment = hosts.environment
        yield hosts, environment


@pytest.fixture
def real_hosts(cluster):
    """The same, for tests that need hosts."""
    if isinstance(cluster[0], OneHost):
        pytest.skip("needs hosts with a network of their own: namespaces, as root")
    return cluster
