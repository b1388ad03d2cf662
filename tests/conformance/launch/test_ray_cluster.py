"""The engine ``ray`` on several machines, all of them this one: where nodes run, and the loss of machines."""

from __future__ import annotations

import types

import pytest
from patient_ray import RealMachines

import launch as lp
from launch.engines import ray as ray_engine

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
PATIENCE = 240.0


@pytest.fixture(scope="module")
def machines():
    """A head and a machine ``left``; tests may add others."""
    made = RealMachines()
    made.left = made.add(left=10)
    yield made
    made.close()


class Service:
    def machine(self):
        return ray.get_runtime_context().get_node_id()


def service_program(num_services=1):
    program = lp.Program("test")
    services = [program.add_node(lp.CourierNode(Service), label="service") for _ in range(num_services)]

    def main(services):
        lp.wait_for_stop()

    program.add_node(lp.PyNode(main, services), label="main")
    return program


def start(resources, num_services=1, **options):
    on_head = {"custom": {"head": 0.1}}  # Which no test loses.
    given = {"service": resources, "main": on_head}
    return lp.start(service_program(num_services), "ray", resources=given, **options)


def machine_of(job, index=0):
    """Calls as often as the call is lost."""
    while True:
        try:
            return job.client("service", index).with_timeout(PATIENCE).machine()
        except lp.CallLost:
            continue


def test_nodes_run_where_there_is_what_they_need(machines):
    for name, expected in (("left", machines.left), ("head", machines.head)):
        with start({"custom": {name: 1}}) as job:
            assert machine_of(job) == expected


@pytest.mark.release
@pytest.mark.parametrize(
    ("resources", "count", "expected"),
    [
        ({"strategy": "STRICT_PACK", "num_cpus": 0.5}, 2, 1),
        ({"strategy": "STRICT_SPREAD", "num_cpus": 0.5}, 2, 2),
        ({"strategy": "SPREAD"}, 6, 2),  # They start apart, and reserve nothing.
    ],
    ids=lambda value: value["strategy"] if isinstance(value, dict) else str(value),
)
def test_strategies_of_placement(machines, resources, count, expected):
    with start(resources, count) as job:
        assert len({machine_of(job, index) for index in range(count)}) == expected


def test_what_the_cluster_has_not_is_an_error_at_once_unless_an_autoscaler_may_add_it(machines, monkeypatch):
    lacks = r"'service': got GPU 1 for each of 1 nodes, (?=.*has CPU 4, head 10)(?=.*has CPU 4, left 10)"
    with pytest.raises(lp.LaunchError, match=lacks):
        start({"num_gpus": 1})
    monkeypatch.setenv("LAUNCH_AUTOSCALING", "1")
    with start({"num_gpus": 1}) as job:
        assert job.nodes()[0]["state"] == "starting"
        job.stop()
        job.wait(timeout=PATIENCE)
        assert job.nodes()[0]["error"] == "the program stopped before it had begun"


def test_nodes_move_when_their_machine_is_lost(machines):
    first = machines.add(somewhere=1)
    with start({"custom": {"somewhere": 1}}, restarts={"service": 1}) as job:
        assert machine_of(job) == first
        second = machines.add(somewhere=1)
        machines.lose(first)
        while (found := machine_of(job)) == first:  # what lived there notices in a moment
            assert not job.over
        assert found == second


@pytest.fixture
def on_placement(monkeypatch):
    """Does something to each actor before its node begins."""
    place = ray_engine.RayHost.place

    def then(do):
        def placed(*args):
            actor = place(*args)
            do(actor)
            return actor

        monkeypatch.setattr(ray_engine.RayHost, "place", placed)

    return then


def test_a_node_whose_machine_is_lost_before_it_started_has_not_failed(machines, on_placement):
    """It is placed again, three times at most; a restart is not used up."""
    lost = []

    def lose(actor):
        if len(lost) < losses:
            lost.append(actor)
            ray.kill(actor)

    on_placement(lose)
    losses = 2
    with start({"num_cpus": 1}) as job:
        assert machine_of(job) and len(lost) == 2
        assert [node["restarts"] for node in job.nodes()] == [0, 0]
    losses, lost[:] = 10, []
    with pytest.raises(lp.NodeError, match="Ray actor ended"), start({"num_cpus": 1}) as job:
        job.wait(timeout=PATIENCE)


@pytest.mark.release
def test_a_node_that_misses_an_order_is_ended(machines, on_placement):
    """What Ray could not deliver is gone, and what follows it would make no sense."""

    def unreachable(data):
        raise ray.exceptions.RayError("the machine could not be reached")

    def cut_off(actor):
        actor.give = types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=unreachable))

    on_placement(cut_off)
    with pytest.raises(lp.NodeError, match="could not be reached"), start({}) as job:
        job.wait(timeout=PATIENCE)
