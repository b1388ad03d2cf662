"""A server on a GPU acts as one on the CPU does."""

import numpy as np
import pytest

from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from framework.actors.inference_slots import Slots
from framework.environments.testing import make_spec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

AGENTS = {
    "dqn": lambda: DQN(DQNConfig(hidden_sizes=(8,))),
    "impala, recurrent": lambda: IMPALA(IMPALAConfig(hidden_sizes=(8,), lstm_size=4)),
    "ppo, recurrent": lambda: PPO(PPOConfig(hidden_sizes=(8,), recurrent="lstm", recurrent_size=4)),
}


@pytest.mark.parametrize("name", AGENTS)
def test_the_same_actions_on_both_devices(name):
    agent, spec = AGENTS[name](), make_spec()
    torch.manual_seed(0)
    networks = {"cpu": agent.make_networks(spec), "cuda": agent.make_networks(spec)}
    networks["cuda"].load_state_dict(networks["cpu"].state_dict())
    observations = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)
    actions = {}
    for device, module in networks.items():
        slots = Slots(agent.make_policy(module.to(device), evaluation=True), spec, 4)
        rows = slots.connect("a", 4)
        actions[device] = []
        for observation in observations:
            slots.write(rows, observation, np.zeros(4, bool))
            slots.act([rows])
            actions[device].append(slots.read(rows)[0].tolist())
    assert actions["cpu"] == actions["cuda"]
