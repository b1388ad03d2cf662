"""The way of a new version of the parameters, from the optimizer's step to an actor's forward pass."""

import pathlib
import pickle
import sys

import numpy as np

import framework
from agents.dqn import DQN, DQNConfig
from framework.actors import PolicyActor
from framework.environments.testing import make_spec
from framework.specs import Array
from framework.variables import VariableBlock, VariableClient

ROOT = str(pathlib.Path(framework.__file__).parent)


def test_it_passes_few_functions_and_two_copies(tmp_path):
    spec = make_spec(observations=Array((3,), np.float32))
    agent = DQN(DQNConfig(hidden_sizes=(4,)))
    learner = agent.make_learner(agent.make_networks(spec), spec)
    block = VariableBlock(learner.parameters(), str(tmp_path / "block"))
    networks = agent.make_networks(spec)
    policy = agent.make_policy(networks)
    # As another process gets it.
    client = VariableClient(pickle.loads(pickle.dumps(block)), networks, policy)
    actor = PolicyActor(policy, None, client)
    passed = []

    def profile(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            passed.append((code.co_name, code.co_firstlineno))

    sys.setprofile(profile)
    block.publish(1, learner.parameters(), env_steps=20)
    actor.update()
    sys.setprofile(None)
    # Two make arrays of the learner's tensors; two tell networks and policy that they have newer ones, and
    # three that the networks' modules settle, whose calls are then quicker.
    assert len(set(passed)) <= 14, passed  # 15 with the policy's step
    assert [name for name, _ in passed].count("copy_variables") == 2
    assert policy.progress == (1, 20)
