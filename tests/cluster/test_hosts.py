"""Hosts that are namespaces: apart from each other, joined by a network, and gone at the end."""

import os

import hosts as hosts_module
import pytest
from hosts import CannotMakeHosts, Hosts

pytest.importorskip("ray")  # With the other tests of hosts.
pytestmark = [pytest.mark.ray, pytest.mark.release]


@pytest.fixture
def pair():
    try:
        hosts = Hosts(2).__enter__()
    except CannotMakeHosts as error:
        pytest.skip(f"no hosts here: {error}")
    yield hosts
    hosts.__exit__()


def test_hosts_have_names_memory_and_processes_of_their_own_and_reach_each_other(pair):
    assert [host.run(["hostname"]).stdout.strip() for host in (pair[0], pair[1])] == ["host1", "host2"]
    pair[0].run(["touch", "/dev/shm/mine"])
    assert pair[1].run(["ls", "/dev/shm"]).stdout == ""
    before = pair[1].received()
    program = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); "
    program += "c, _ = s.accept(); print(len(c.makefile('rb').read()))"
    server = pair[1].start(["python3", "-c", program], stdout=-1)
    assert server.stdout.readline() == "up\n"
    client = "import socket; socket.create_connection(('10.77.0.2', 5000)).sendall(bytes(1_000_000))"
    pair[0].run(["python3", "-c", client])
    assert server.communicate(timeout=hosts_module.PATIENCE)[0] == "1000000\n"
    assert 1_000_000 < pair[1].received() - before < 1_200_000


def test_no_process_outlives_its_host(pair):
    sleeper = pair[0].start(["sleep", "1000"])
    first = pair[0].pid
    pair.__exit__()
    assert sleeper.wait(hosts_module.PATIENCE) != 0
    assert not os.path.exists(f"/proc/{first}")
