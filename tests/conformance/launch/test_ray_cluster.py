"""The engine ``ray`` on a cluster of several machines, all of them this one, while nodes are killed."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time

import pytest
from patient_ray import started

import launch as lp

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

PATIENCE = 240.0


@pytest.fixture(scope="module")
def cluster():
    """A head and one machine ``left``; tests may add others."""
    from ray.cluster_utils import Cluster

    ray.shutdown()  # The cluster of other files.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    small = {"object_store_memory": 100 << 20, "num_cpus": 4}
    head = {**small, "include_dashboard": False, "resources": {"head": 10}}
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    started(lambda: cluster.add_node(resources={"left": 10}, **small))
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Service:
    def __init__(self):
        self._entered = threading.Event()

    def machine(self):
        return ray.get_runtime_context().get_node_id()

    def pid(self):
        return os.getpid()

    def wait(self):
        self._entered.set()
        threading.Event().wait()

    def entered(self):
        return self._entered.wait(PATIENCE)


def service_program(num_services=1):
    program = lp.Program("test")
    services = [program.add_node(lp.CourierNode(Service), label="service") for _ in range(num_services)]

    def main(services):
        lp.wait_for_stop()

    program.add_node(lp.PyNode(main, services), label="main")
    return program


def ask(client, method):
    """Calls as often as the call is lost."""
    while True:
        try:
            return getattr(client.with_timeout(PATIENCE), method)()
        except lp.CallLost:
            continue


def test_groups_are_placed_by_their_resources(cluster):
    def main(service):
        lp.stop((service.machine(), ray.get_runtime_context().get_node_id()))

    program = lp.Program("test")
    service = program.add_node(lp.CourierNode(Service), label="service")
    program.add_node(lp.PyNode(main, service), label="main")
    there, here = lp.launch(
        program, "ray", resources={"service": {"custom": {"left": 1}}, "main": {"custom": {"head": 1}}}
    )
    machines = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
    assert "left" in machines[there]
    assert "head" in machines[here]


@pytest.mark.parametrize("strategy, machines", [("STRICT_PACK", 1), ("STRICT_SPREAD", 2)])
def test_strategies_of_placement(cluster, strategy, machines):
    resources = {"service": {"strategy": strategy, "num_cpus": 0.5}}
    with lp.start(service_program(2), "ray", resources=resources) as job:
        places = {job.client("service", index).machine() for index in range(2)}
        assert len(places) == machines


def test_nodes_with_spread_start_apart_and_reserve_nothing(cluster):
    with lp.start(service_program(6), "ray", resources={"service": {"strategy": "SPREAD"}}) as job:
        places = {job.client("service", index).machine() for index in range(6)}
        assert len(places) == 2


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        # In any order.
        (
            {"num_gpus": 1},
            r"'service': got GPU 1 for each of 2 nodes, (?=.*has CPU 4, head 10)(?=.*has CPU 4, left 10)",
        ),
        ({"num_cpus": 3, "strategy": "STRICT_PACK"}, "one host that has this 2 times, for STRICT_PACK"),
    ],
)
def test_what_the_cluster_has_not_is_an_error_at_once(cluster, resources, message):
    with pytest.raises(lp.LaunchError, match=message):
        lp.launch(service_program(2), "ray", resources={"service": resources})


@pytest.mark.filterwarnings("ignore::launch.StopTimeoutWarning")
def test_what_the_cluster_has_not_waits_for_an_autoscaler(cluster, monkeypatch):
    monkeypatch.setenv("LAUNCH_AUTOSCALING", "1")
    with lp.start(service_program(), "ray", resources={"service": {"num_gpus": 1}}, stop_timeout=0.5) as job:
        assert {node["state"] for node in job.nodes() if node["group"] == "service"} == {"starting"}


def test_resources_of_the_command_line(cluster, tmp_path):
    from framework.commands import cli

    settings = "--engine ray --num-learners 2 --max-learner-steps 20 --batch-size 4 --evaluate-period None"
    resources = "learner.custom.left=1 learner.num_cpus=1 learner.strategy=STRICT_PACK actor.num_cpus=1"
    arguments = [*settings.split(), "--directory", str(tmp_path / "run"), "--resources", *resources.split()]
    assert cli.main(["train", "impala", *arguments]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["learner_steps"] == 20


def test_a_killed_node_comes_back_where_its_clients_find_it(cluster):
    with lp.start(service_program(), "ray", restarts={"service": 1}) as job:
        client = job.client("service")
        first = client.pid()
        lost = client.futures.wait()
        assert client.entered()
        os.kill(first, signal.SIGKILL)
        assert isinstance(lost.exception(PATIENCE), lp.CallLost)
        assert ask(client, "pid") != first
        (service,) = [node for node in job.status()["nodes"] if node["group"] == "service"]
        assert service["restarts"] == 1


def test_a_killed_node_without_restarts_ends_the_program(cluster):
    job = lp.start(service_program(), "ray")
    os.kill(job.client("service").pid(), signal.SIGKILL)
    with pytest.raises(lp.NodeError, match=r"service-0.*Ray actor"):
        job.wait(timeout=PATIENCE)


def test_a_hung_node_is_found(cluster):
    job = lp.start(service_program(), "ray", heartbeat_timeout=20.0)
    pid = job.client("service").pid()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(lp.NodeError, match=r"service-0.*no sign of life"):
        job.wait(timeout=PATIENCE)


def dqn_program(directory, steps):
    from agents.dqn import DQN, DQNConfig
    from framework.environments.testing import FakeEnvironment
    from framework.programs import RunConfig, make_program

    config = DQNConfig(min_replay_size=50, batch_size=16, samples_per_insert=1.0, hidden_sizes=(16,))
    return make_program(
        DQN(config),
        functools.partial(FakeEnvironment, episode_length=7),
        RunConfig(
            envs_per_actor=2,
            max_env_steps=steps,
            evaluate_period=steps // 2,
            num_evaluation_episodes=2,
            checkpoint_period=200,
            directory=directory,
        ),
    )


def test_a_whole_program(cluster, tmp_path):
    resources = {"actor": {"custom": {"left": 1}}, "replay": {"custom": {"head": 1}}}
    result = lp.launch(dqn_program(tmp_path, 500), "ray", directory=tmp_path, resources=resources)
    assert result["reason"] == "max_env_steps"
    assert result["env_steps"] == 500
    assert (tmp_path / "status.json").exists()


def test_nodes_move_when_their_machine_is_lost(cluster):
    small = {"num_cpus": 4, "object_store_memory": 100 << 20}
    right = started(lambda: cluster.add_node(resources={"right": 1, "somewhere": 1}, **small))
    with lp.start(
        service_program(),
        "ray",
        restarts={"service": 1},
        resources={"service": {"custom": {"somewhere": 1}}, "main": {"custom": {"head": 1}}},
    ) as job:
        client = job.client("service")
        first = client.machine()
        assert first == right.node_id
        started(lambda: cluster.add_node(resources={"somewhere": 1}, **small))
        cluster.remove_node(right, allow_graceful=False)
        deadline = time.monotonic() + PATIENCE
        while ask(client, "machine") == first:  # what lived there notices in a moment
            assert time.monotonic() < deadline


def test_a_whole_program_survives_the_loss_of_the_machine_of_its_replay(cluster, tmp_path):
    small = {"num_cpus": 4, "object_store_memory": 100 << 20, "resources": {"replay": 1}}
    doomed = started(lambda: cluster.add_node(**small))
    program = dqn_program(tmp_path, 12_000)  # not over before the machine is gone
    resources = {group: {"custom": {"head": 0.1}} for group in program.groups}
    resources["replay"] = {"custom": {"replay": 1}}
    with lp.start(
        program, "ray", directory=tmp_path, resources=resources, restarts={"replay": 1}, stop_timeout=60.0
    ) as job:
        assert job.client("counter").wait_for("env_steps", 500, timeout=PATIENCE)
        cluster.remove_node(doomed, allow_graceful=False)
        started(lambda: cluster.add_node(**small))
        result = job.wait(timeout=PATIENCE)
        assert result["env_steps"] == 12_000
        restarts = {node["label"]: node["restarts"] for node in job.status()["nodes"]}
        assert {label for label, count in restarts.items() if count} == {"replay-0"}
