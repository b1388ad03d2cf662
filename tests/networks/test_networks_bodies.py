"""SimBa: its formula by hand, and the sizes of published networks."""

import numpy as np
import pytest
import torch
from agent_batches import make_learner

from agents.crossq import CrossQ
from agents.d4pg import D4PG, D4PGConfig
from agents.simba import SimBa as SimBaAgent
from agents.simba import SimBaConfig
from agents.td3 import TD3, TD3Config
from agents.td7 import TD7, TD7Config
from framework import networks, specs
from framework.environments.testing import make_spec


def norm(x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


def test_simba_by_hand():
    torch.manual_seed(0)
    body, x = networks.SimBa(3, (4, 4), 2), np.random.default_rng(0).normal(size=3)
    weights = {name: each.detach().double().numpy() for name, each in body.named_parameters()}
    for name in [name for name in weights if name.endswith("0.weight") and weights[name].ndim == 2]:
        np.testing.assert_allclose(weights[name].T @ weights[name], np.eye(3), atol=1e-6)

    def linear(name, y):
        return weights[f"{name}.weight"] @ y + weights[f"{name}.bias"]

    y = linear("layers.0", x)
    for block in ("layers.1.layers", "layers.2.layers"):
        hidden = linear(f"{block}.1", norm(y))
        assert hidden.shape == (16,)
        y = y + linear(f"{block}.3", np.maximum(hidden, 0.0))
    found = body(torch.tensor(x, dtype=torch.float32).expand(2, 5, 3))
    np.testing.assert_allclose(found[1, 4].detach(), linear("head", norm(y)), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"^hidden_sizes: got \(4, 8\), expected one width"):
        networks.SimBa(3, (4, 8))


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


WALKER = make_spec(specs.Array((17,), np.float32), specs.BoundedArray((6,), np.float32, -1.0, 1.0))


def test_published_networks_have_their_sizes():
    simba, crossq = (agent().make_networks(WALKER) for agent in (SimBaAgent, CrossQ))
    block = 2 * 512 + 513 * 2048 + 2049 * 512
    assert count(simba.critics) == 2 * (24 * 512 + 2 * block + 2 * 512 + 513)
    assert count(simba.policy) == 18 * 128 + (2 * 128 + 129 * 512 + 513 * 128) + 2 * 128 + 129 * 12
    # A batch renormalization of n inputs has 2 n parameters.
    assert count(crossq.critics) == 2 * (2 * 23 + 24 * 2048 + 2049 * 2048 + 4 * 2048 + 2049)
    assert count(crossq.policy) == 2 * 17 + 18 * 256 + 257 * 256 + 4 * 256 + 257 * 12


def test_all_parameters_of_simba_decay():
    agent = SimBaAgent(SimBaConfig(hidden_sizes=(8,), critic_hidden_sizes=(8,), weight_decay=0.5))
    groups = make_learner(agent, WALKER).optimizer.param_groups
    assert [(group["weight_decay"], group["decoupled_weight_decay"]) for group in groups] == [(0.5, True)] * 3


@pytest.mark.parametrize(("agent", "config"), [(TD3, TD3Config), (D4PG, D4PGConfig), (TD7, TD7Config)])
def test_agents_of_td3_have_it_too(agent, config):
    sizes = {"network": "simba", "hidden_sizes": (8,), "critic_hidden_sizes": (6, 6), "num_critics": 2}
    made = agent(config(**sizes)).make_networks(WALKER)
    bodies = [made.policy.body, *made.critics.heads]
    assert [type(body).__name__ for body in bodies] == ["SimBa"] * 3
    assert [body.layers[0].out_features for body in bodies] == [8, 6, 6]
