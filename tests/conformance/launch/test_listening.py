"""Which ports the processes of a program listen at, and for whom."""

from __future__ import annotations

import contextlib
import ipaddress

import psutil
import pytest
import zmq

import launch as lp
from launch.rpc import sockets

pytestmark = pytest.mark.skipif(not hasattr(psutil, "net_connections"), reason="psutil shows no sockets here")


class Service:
    def listening(self):
        """`[(interface, port)]` of this process and its children."""
        me, found = psutil.Process(), []
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # A worker of Ray for an earlier test ends now.
                found += [
                    tuple(connection.laddr)
                    for connection in process.net_connections("inet")
                    if connection.status == psutil.CONN_LISTEN
                ]
        return found


@pytest.mark.real
def test_only_authenticated_sockets_are_open_to_others(engine):
    """Engines of one machine listen at no port; nodes of Ray at one each, which takes the program's key."""

    def main(service, other):
        lp.stop({"service": service.listening(), "main": Service().listening(), "other": other.listening()})

    program = lp.Program("listening")
    service = program.add_node(lp.CourierNode(Service), label="service")
    other = program.add_node(lp.CourierNode(Service), label="other")
    program.add_node(lp.PyNode(main, service, other), label="main")
    before = {tuple(address) for address in Service().listening()}
    found = lp.launch(program, engine)
    for label, addresses in found.items():
        opened = [a for a in map(tuple, addresses) if not ipaddress.ip_address(a[0]).is_loopback]
        if engine == "ray":  # Ray's own worker has a port too; ours refuse peers without the key
            for interface, port in opened:
                assert not answers_without_key(interface, port), (label, interface, port)
        else:
            assert set(opened) <= before, label


def answers_without_key(interface: str, port: int) -> bool:
    """Whether a ZeroMQ peer without keys gets anything out of a port."""
    host = "127.0.0.1" if ipaddress.ip_address(interface).is_unspecified else interface
    socket = sockets.context().socket(zmq.DEALER)
    try:
        socket.connect(f"tcp://{host}:{port}")
        socket.send(b"hello")
        return bool(socket.poll(300))
    finally:
        socket.close(linger=0)


def test_job_listens_at_no_port_either(concurrent_engine):
    if concurrent_engine == "ray":
        pytest.skip("Ray's driver listens for its workers")
    before = Service().listening()
    program = lp.Program("listening")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="main")
    with lp.start(program, concurrent_engine):
        assert Service().listening() == before
