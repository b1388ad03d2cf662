"""A driver: a learner on one host, a variable source and its clients on another. Prints what it saw."""

from __future__ import annotations

import json
import sys

from far_learner import SPEC, FarLearner, networks_of
from hosts import received_bytes

import launch
from agents.dqn import DQN, DQNConfig
from framework.programs import RunConfig
from framework.variables import VariableClient
from framework.workers.variable_source import VariableSource
from framework.workers.worker import Setup

AGENT = DQN(DQNConfig(hidden_sizes=(1000, 1000), layer_norm=False))  # 4 MB of parameters
SETUP = Setup(AGENT, None, SPEC, RunConfig())  # type: ignore[arg-type]
VERSIONS, CLIENTS = 3, 4


def read(learner, source):
    """Reads each version with several clients, and counts what has come into this host meanwhile."""
    clients = []
    for _ in range(CLIENTS):
        networks = networks_of(AGENT, -1)
        clients.append((VariableClient(source, networks, AGENT.make_policy(networks)), networks))
    assert source.wait_for_version(0, 60.0)
    before, found = _received(), []
    for version in range(1, VERSIONS + 1):
        learner.publish(version)
        assert source.wait_for_version(version, 60.0)
        for client, networks in clients:
            client.update(wait=True)
            found.append([client.version, float(next(networks.q_network.parameters()).flatten()[0].detach())])
    copies, learners_host = learner.seen()
    size = sum(parameter.nbytes for parameter in networks_of(AGENT, 0).q_network.parameters())
    launch.stop({
        "found": found,
        "copies": copies,
        "received": _received() - before,
        "size": size,
        "hosts": [learners_host.split()[0], launch.get_node_context().host.split()[0]],
    })  # fmt: skip


def _received():
    with open("/proc/net/dev") as table:
        return received_bytes(table.read())


def main(direct):
    program = launch.Program("sources")
    learner = program.add_node(launch.CourierNode(FarLearner, AGENT), label="learner")
    source = launch.CourierNode(VariableSource, SETUP, learner=learner)
    serves = learner if direct else program.add_node(source, label="variable_source")
    program.add_node(launch.PyNode(read, learner, serves), label="reader")
    places = {"learner": "host1", "variable_source": "host2", "reader": "host2"}
    resources = {group: {"custom": {places[group]: 1}} for group in program.groups}
    print(json.dumps(launch.launch(program, "ray", resources=resources, heartbeat_timeout=None)))


if __name__ == "__main__":
    main(direct=sys.argv[1] == "direct")
