"""A driver: a learner on one host, a variable source and its clients on another. Prints what it saw."""

from __future__ import annotations

import json
import sys
import threading

import numpy as np
import torch
from dm_env import specs as dm_specs
from hosts import received_bytes

import launch
from agents.dqn import DQN, DQNConfig
from framework import specs
from framework.programs import RunConfig, make_program
from framework.programs.variable_source import VariableSource
from framework.programs.worker import Setup
from framework.variables import VariableBlock, VariableClient

SPEC = specs.EnvironmentSpec(
    dm_specs.Array((4,), np.float32),
    dm_specs.DiscreteArray(2),
    dm_specs.Array((), np.float32),
    dm_specs.BoundedArray((), np.float32, 0.0, 1.0),
)
AGENT = DQN(DQNConfig(hidden_sizes=(1000, 1000), layer_norm=False))  # 4 MB of parameters
SETUP = Setup(AGENT, None, SPEC, RunConfig())  # type: ignore[arg-type]
VERSIONS, CLIENTS = 3, 4


def networks_of(version):
    networks = AGENT.make_networks(SPEC)
    with torch.no_grad():
        for parameter in networks.parameters():
            parameter.fill_(version)
    return networks


class Learner:
    """Publishes version v with parameters that are all v. Counts the copies that it sends."""

    def __init__(self):
        parameters = self._parameters(0)
        self._block = VariableBlock(parameters)
        self._block.publish(0, parameters)
        self._changed = threading.Condition()
        self.copies = 0

    def _parameters(self, version):
        return {"q_network": networks_of(version).q_network.state_dict()}

    def variable_block(self):
        return self._block

    def get_variables(self, names=(), newer_than=-1, timeout=0.0):
        with self._changed:
            self._changed.wait_for(lambda: self._block.version > newer_than, timeout)
            found = self._block.get_variables(names, newer_than)
            self.copies += found is not None
            return found

    def wait_for_version(self, version, timeout, actor=None):
        with self._changed:
            return self._changed.wait_for(lambda: self._block.version >= version, timeout)

    def publish(self, version):
        with self._changed:
            self._block.publish(version, self._parameters(version), 10 * version)
            self._changed.notify_all()

    def seen(self):
        return self.copies, launch.get_node_context().host


def read(learner, source):
    """Reads each version with several clients, and counts what has come into this host meanwhile."""
    clients = []
    for _ in range(CLIENTS):
        networks = networks_of(-1)
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
    size = sum(parameter.nbytes for parameter in networks_of(0).q_network.parameters())
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


def train(directory):
    """A whole program, whose actors and evaluator are on the host of their variable source."""
    run = RunConfig(
        directory=directory,
        num_actors=2,
        max_env_steps=600,
        evaluate_period=600,
        num_evaluation_episodes=2,
        variable_sources=1,
        publish_period=1,
    )
    agent = DQN(DQNConfig(min_replay_size=50, batch_size=16, samples_per_insert=4.0, insert_burst=32))
    program = make_program(agent, "gymnasium:CartPole-v1", run)
    elsewhere = {"actor", "evaluator", "variable_source"}
    resources = {of: {"custom": {"host2" if of in elsewhere else "host1": 1}} for of in program.groups}
    print(json.dumps(launch.launch(program, "ray", resources=resources, heartbeat_timeout=None)))


def main(direct):
    program = launch.Program("sources")
    learner = program.add_node(launch.CourierNode(Learner), label="learner")
    serves = learner
    if not direct:
        serves = program.add_node(
            launch.CourierNode(VariableSource, SETUP, learner=learner), label="variable_source"
        )
    program.add_node(launch.PyNode(read, learner, serves), label="reader")
    places = {"learner": "host1", "variable_source": "host2", "reader": "host2"}
    resources = {group: {"custom": {places[group]: 1}} for group in program.groups}
    print(json.dumps(launch.launch(program, "ray", resources=resources, heartbeat_timeout=None)))


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2])
    else:
        main(direct=sys.argv[1] == "direct")
