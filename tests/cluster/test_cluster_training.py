"""A program that learns over three hosts while one of them dies and another one joins."""

import pytest
from far_run import Run, flags
from hosts import CannotMakeHosts, Hosts, join_ray, start_ray

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster():
    """Three hosts with Ray, and the environment of a driver."""
    try:
        hosts = Hosts(3).__enter__()
    except CannotMakeHosts as error:
        pytest.skip(f"no hosts here: {error}")
    try:
        yield hosts, start_ray(hosts)
    finally:
        hosts.__exit__()


def test_ppo_learns_while_a_host_dies_and_another_joins(cluster):
    hosts, environment = cluster
    run = Run(hosts[0], environment, "ppo", flags(10_000_000))
    try:
        run.until(lambda: run.env_steps() > 4_000, "the start")
        hosts[2].close()
        run.until(lambda: any(node["restarts"] for node in run.nodes()), "the loss of its actors")
        join_ray(hosts.add(), environment)
        run.until(lambda: all(node["state"] == "running" for node in run.nodes()), "their return")
        run.until(lambda: run.evaluated() >= 150, "learning")
        run.until(lambda: [row["actors"] for row in run.rows() if "actors" in row][-1] == 4, "all four")
        assert not run.over()
        actors = [row["actors"] for row in run.rows() if "actors" in row]
        assert min(actors) == 2 and max(actors) == 4
    finally:
        output = run.end()
    assert "is lost and will be restarted" in output
