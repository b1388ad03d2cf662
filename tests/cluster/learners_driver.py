"""A driver: two learners, on two hosts. Prints what they learned, beside what one learns."""

from __future__ import annotations

import functools
import json
import sys

import numpy as np
from shared_batches import learn, listening, make_learner

import launch
from agents.dqn import DQN, DQNConfig
from framework.learners.group import FirstLearner, GroupMember
from framework.programs import RunConfig, make_program

AGENTS = ("dqn", "ppo", "impala", "sac")


class Client:
    """What a `GroupMember` asks of the first learner of one agent."""

    def __init__(self, node, name):
        self._node, self._name = node, name

    def __getattr__(self, method):
        return functools.partial(self._node.ask, self._name, method)


def take_part(name, rank, learner, first):
    """Some steps in the group; what they led to, and the addresses at which the group listened."""
    member = GroupMember(learner, rank, 2, first)
    before = listening()
    assert member.go_on() is not None
    addresses = {address for address, _ in listening() - before}
    found = learn(name, learner, rank, 2)
    member.leave()
    return found["parameters"], sorted(addresses)


class First:
    """The learners of rank 0, one agent after the other."""

    def __init__(self):
        self._learners = {name: make_learner(name, 0, 2) for name in AGENTS}
        self._firsts = {name: FirstLearner(learner, 2) for name, learner in self._learners.items()}

    def ask(self, name, method, *arguments):
        return getattr(self._firsts[name], method)(*arguments)

    def run(self):
        self._found = {name: take_part(name, 0, self._learners[name], self._firsts[name]) for name in AGENTS}
        launch.wait_for_stop()

    def compare(self, theirs, their_host):
        """The largest differences of parameters from those of one learner, and how far that one moved."""
        report = {"hosts": [launch.get_node_context().host.split()[0], their_host], "agents": {}}
        for name in AGENTS:
            learner = make_learner(name)
            start = {key: value.numpy().copy() for key, value in learner.networks.state_dict().items()}
            alone = learn(name, learner, 0, 1)["parameters"]
            of_both = [self._found[name], theirs[name]]
            report["agents"][name] = {
                "differences": [distance(parameters, alone) for parameters, _ in of_both],
                "moved": distance(start, alone),
                "addresses": [addresses for _, addresses in of_both],
            }
        return report


def distance(some, others):
    return max(float(np.abs(some[key] - others[key]).max()) for key in others)


def second(first):
    found = {name: take_part(name, 1, make_learner(name, 1, 2), Client(first, name)) for name in AGENTS}
    launch.stop(first.compare(found, launch.get_node_context().host.split()[0]))


def equal():
    program = launch.Program("learners")
    first = program.add_node(launch.CourierNode(First), label="first")
    program.add_node(launch.PyNode(second, first), label="second")
    resources = {"first": {"custom": {"host1": 1}}, "second": {"custom": {"host2": 1}}}
    return launch.launch(program, "ray", resources=resources, heartbeat_timeout=None)


def train(directory):
    """A whole program with a learner on each host."""
    settings = {"num_learners": 2, "max_learner_steps": 40, "evaluate_period": None}
    spread = {"learner": {"strategy": "STRICT_SPREAD"}}
    run = RunConfig(directory=directory, resources=spread, **settings)
    agent = DQN(DQNConfig(min_replay_size=50, batch_size=16, samples_per_insert=4.0, insert_burst=64))
    return launch.launch(
        make_program(agent, "gymnasium:CartPole-v1", run), "ray", directory=directory, heartbeat_timeout=None
    )


if __name__ == "__main__":
    print(json.dumps(equal() if sys.argv[1] == "equal" else train(sys.argv[2])))
