"""Nodes that serve the parameters of a learner in its place."""

from __future__ import annotations

from far_learner import SPEC, FarLearner, networks_of

import launch
from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from framework.programs import RunConfig, make_program
from framework.variables import VariableClient
from framework.workers.variable_source import VariableSource
from framework.workers.worker import Setup

CARTPOLE = "gymnasium:CartPole-v1"
AGENT = DQN(DQNConfig(hidden_sizes=(8,)))
SETUP = Setup(AGENT, None, SPEC, RunConfig())  # type: ignore[arg-type]


def _read(learner, sources):
    """Reads versions 0 to 2 with three clients of each source."""
    clients = []
    for source in sources:
        for _ in range(3):
            networks = networks_of(AGENT, -1)
            policy = AGENT.make_policy(networks)
            clients.append((VariableClient(source, networks, policy), networks, policy))
    found = []
    for version in range(3):
        if version:
            learner.publish(version)
        for source in sources:
            assert source.wait_for_version(version, 60.0)
        for client, networks, policy in clients:
            client.update(wait=True)
            value = float(next(networks.q_network.parameters()).flatten()[0].detach())
            found.append((client.version, policy.progress.env_steps, value))
    launch.stop({"found": found, "copies": learner.seen()[0]})


def test_a_source_pulls_each_version_once_and_serves_all():
    program = launch.Program("sources")
    learner = program.add_node(launch.CourierNode(FarLearner, AGENT), label="learner")
    with program.group("source"):
        sources = [
            program.add_node(launch.CourierNode(VariableSource, SETUP, learner=learner)) for _ in range(2)
        ]
    program.add_node(launch.PyNode(_read, learner, sources), label="reader")
    result = launch.launch(program, engine="processes")
    assert result["found"] == [(v, 10 * v, float(v)) for v in range(3) for _ in range(6)]
    assert result["copies"] == 6  # three versions for each of two sources


def test_an_agent_on_policy_waits_through_a_source():
    config = RunConfig(num_actors=2, envs_per_actor=2, max_env_steps=640, variable_sources=1)
    program = make_program(PPO(PPOConfig(unroll_length=16)), CARTPOLE, config)
    assert launch.launch(program, engine="serial")["env_steps"] == 640
