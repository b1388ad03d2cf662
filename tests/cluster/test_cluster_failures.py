"""What a program over several hosts does when a host is cut off for a while, and when Ray's head dies."""

import threading

import psutil
import pytest
from far_run import Run, flags

pytest.importorskip("ray")
NUM_HOSTS = 3
pytestmark = [pytest.mark.ray, pytest.mark.release, pytest.mark.timeout(900)]

CUT_S = 5.0  # Less than what a heartbeat may be late.


def test_a_cut_host_delays_the_program_and_the_death_of_the_head_ends_it(real_hosts):
    hosts, environment = real_hosts
    run = Run(hosts[0], environment, "impala", flags(10_000_000))
    try:
        run.until(lambda: run.env_steps() > 1_000, "the start")
        hosts.connect(2, on=False)
        threading.Event().wait(CUT_S)
        hosts.connect(2, on=True)
        before = run.env_steps()
        run.until(lambda: run.env_steps() > before + 2_000, "the steps after the cut")
        assert not run.over() and not any(node["restarts"] for node in run.nodes())
        (head,) = hosts[0].processes("gcs_server")
        head.kill()
        assert run.wait() == 1
        nodes = [process for host in hosts for process in host.processes("ray::HostActor")]
        assert not psutil.wait_procs(nodes, timeout=5)[1]
    finally:
        output = run.end()
    (said,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert "The head of the Ray cluster at" in said and "does not answer" in said
