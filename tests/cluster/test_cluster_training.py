"""A program that learns over three hosts while one of them dies and another one joins."""

import pytest
from far_run import Run, flags
from hosts import Hosts, join_ray

pytest.importorskip("ray")
NUM_HOSTS = 3
pytestmark = [pytest.mark.ray, pytest.mark.release, pytest.mark.timeout(900)]


def test_impala_learns_while_a_host_dies_and_another_joins(cluster):
    (hosts, environment), has_hosts = cluster, isinstance(cluster[0], Hosts)
    run = Run(hosts[0], environment, "impala", flags(10_000_000))
    try:
        run.until(lambda: run.env_steps() > 4_000, "the start")
        hosts[2].close()
        run.until(lambda: any(node["restarts"] for node in run.nodes()), "the loss of its actors")
        if has_hosts:  # Nodes of one host divide the variable sources, and so need the lost one.
            before = run.env_steps()
            run.until(lambda: run.env_steps() > before + 2_000, "learning without them")
        join_ray(hosts.add(), environment)
        run.until(lambda: all(node["state"] == "running" for node in run.nodes()), "their return")
        run.until(lambda: run.evaluated() >= 150, "learning")
        assert not run.over()
    finally:
        output = run.end()
    assert "is lost and will be restarted" in output
