"""Action masks and tuples of actions are learned from; see test_every_agent.py.

An illegal action of an actor or of the evaluator ends the program with an error.
"""

import copy
import dataclasses

import pytest
import torch
from agent_batches import played
from agent_cases import ITEMS, SMALL

from agents.c51 import C51, C51Config
from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from agents.r2d2 import R2D2
from framework.environments import make
from framework.learners import LossContext
from framework.networks import as_tensors
from framework.specs import make_environment_spec
from framework.types import Transition

REPLAY = {"batch_size": 32, "min_replay_size": 64, "insert_burst": 32, "n_step": 1, "samples_per_insert": 8.0}
VALUES = {**REPLAY, "hidden_sizes": (32,), "learning_rate": 5e-3, "discount": 0.9, "epsilon_decay": 500}
dqn = DQN(DQNConfig(**VALUES, learning_rate_decay=3_000))
UNROLLS = {"hidden_sizes": (32,), "unroll_length": 8, "learning_rate": 1e-2}


@pytest.mark.parametrize("mode", ["local", "server"])
def test_only_legal_moves_wherever_actions_come_from(mode, train):
    result, rows = train(dqn, "testing:Masked", 1_000, inference=mode)
    assert result["env_steps"] == 1_000 and result["episode_return"] > 0.3  # At random: 0.
    assert all(abs(row["loss"]) < 100 for row in rows)  # No target from an illegal action's value.


def test_a_choice_and_a_number_at_once_are_learned(train):
    fast = {"epochs": 8, "initial_std": 0.5, "discount": 0.0, "learning_rate_decay": 3_000}
    result, _ = train(PPO(PPOConfig(**UNROLLS, **fast)), "testing:Tuple", 3_000)
    assert result["episode_return"] >= 0.8  # Without training, up to 0.53.


def item_losses(agent, networks, target, seed, next_mask):
    """Losses and priorities of a batch in which action 3 is never taken, nor legal in the first states."""
    random = torch.Generator().manual_seed(seed)
    boards, next_boards = torch.rand(2, 16, 16, generator=random)
    legal = torch.tensor([True, True, True, False]).expand(16, 4)
    before = {"board": boards, "action_mask": legal}
    after = {"board": next_boards, "action_mask": torch.tensor(next_mask).expand(16, 4)}
    actions, rewards = torch.randint(3, (16,), generator=random), torch.rand(16, generator=random)
    data = Transition(before, actions, rewards, torch.full((16,), 0.9), after)
    return agent.item_losses(networks, target, data, LossContext(None, None, None, random))[:2]


FAMILY = {name: SMALL[name] for name in ("dqn", "iqn", "qr_dqn")}
FAMILY["c51"] = C51(C51Config(**ITEMS, v_min=-0.5, v_max=1.0, num_atoms=31))
FAMILY["dqn, munchausen"] = DQN(dataclasses.replace(SMALL["dqn"].config, munchausen=0.9))
SPEC = make_environment_spec(make("testing:Masked"))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("name", FAMILY)
def test_values_of_illegal_actions_change_no_target(name, double):
    agent = type(FAMILY[name])(dataclasses.replace(FAMILY[name].config, double=double))
    torch.manual_seed(0)
    nets = agent.make_networks(SPEC)
    target = copy.deepcopy(nets.q_network)
    before = item_losses(agent, nets, target, 1, [1, 1, 1, 0])
    unmasked = item_losses(agent, nets, target, 1, [1, 1, 1, 1])
    nothing = item_losses(agent, nets, target, 1, [0, 0, 0, 0])
    for network in (nets.q_network, target):
        layer = [part for part in network.head.modules() if isinstance(part, torch.nn.Linear)][-1]
        with torch.no_grad():
            rows = layer.weight.view(4, -1, layer.in_features)[3]
            rows.copy_(50.0 * torch.rand(rows.shape))
    after = item_losses(agent, nets, target, 1, [1, 1, 1, 0])
    changed = item_losses(agent, nets, target, 1, [1, 1, 1, 1])
    for index in (0, 1):
        assert before[index].isfinite().all()
        torch.testing.assert_close(before[index], after[index])
        torch.testing.assert_close(unmasked[index], nothing[index])
        assert not torch.allclose(changed[index], after[index])


@pytest.mark.parametrize("double", [True, False])
def test_values_of_illegal_actions_change_no_error_of_sequences(double):
    agent = R2D2(dataclasses.replace(SMALL["r2d2"].config, double=double, dueling=False))
    batch, networks, _ = played(agent, "testing:Masked")
    mask = batch.data.observation["action_mask"]
    mask[..., 0], mask[..., 3] = True, False
    batch.data.action[:] %= 3
    data, layer, found = as_tensors(batch.data), networks.q_network.head, []
    for _ in range(2):
        found.append(agent.errors(networks.q_network, networks.q_network, data)[0])
        with torch.no_grad():
            [part for part in layer.modules() if isinstance(part, torch.nn.Linear)][-1].bias[3] += 50.0
    torch.testing.assert_close(*found)
