"""SimBa and SimBaV2: their formulas by hand, and the sizes of published networks."""

import numpy as np
import pytest
import torch
from agent_batches import make_learner

from agents.crossq import CrossQ
from agents.d4pg import D4PG, D4PGConfig
from agents.simba import SimBa as SimBaAgent
from agents.simba import SimBaConfig
from agents.simba_v2 import SimBaV2
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


def test_simba_v2_by_hand():
    torch.manual_seed(0)
    body, x = networks.SimBaV2(3, (4, 4), 2), np.random.default_rng(0).normal(size=3)
    with torch.no_grad():  # A step of the learned vectors.
        for each in body.parameters():
            if each.dim() == 1:
                each += 0.1 * torch.randn(each.shape)
    weights = {name: each.detach().double().numpy() for name, each in body.named_parameters()}

    def sphere(y):
        return y / np.linalg.norm(y)

    y = sphere(weights["embedding.1.weight"] * (weights["embedding.0.weight"] @ sphere(np.append(x, 3.0))))
    for block in ("layers.0", "layers.1"):
        hidden = weights[f"{block}.scale.weight"] * (weights[f"{block}.first.weight"] @ y)
        assert hidden.shape == (16,)
        other = sphere(weights[f"{block}.second.weight"] @ (np.maximum(hidden, 0.0) + 1e-8))
        # It begins at 1 / (blocks + 1), stored as 1 / sqrt(width).
        y = sphere(y + weights[f"{block}.step.weight"] * np.sqrt(4) / 3 * (other - y))
    inner = weights["head.parts.0.1.weight"] * (weights["head.parts.0.0.weight"] @ y)
    expected = weights["head.parts.0.2.weight"] @ inner + weights["head.bias"]
    found = body(torch.tensor(x, dtype=torch.float32).expand(2, 5, 3))
    np.testing.assert_allclose(found[1, 4].detach(), expected, rtol=1e-4, atol=1e-5)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


WALKER = make_spec(specs.Array((17,), np.float32), specs.BoundedArray((6,), np.float32, -1.0, 1.0))


def test_published_networks_have_their_sizes():
    two = SimBaV2().make_networks(WALKER)
    block = 2 * 512 * 2048 + 2048 + 512
    assert count(two.critics) == 2 * (25 * 512 + 2 * block + 513 * 512 + 512 * 101 + 101)
    # Mean and standard deviation have a last layer each.
    assert count(two.policy) == 19 * 128 + (2 * 128 * 512 + 640) + 2 * (129 * 128 + 128 * 6 + 6)
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


@pytest.mark.parametrize(("network", "body"), [("simba", "SimBa"), ("simba_v2", "SimBaV2")])
@pytest.mark.parametrize(("agent", "config"), [(TD3, TD3Config), (D4PG, D4PGConfig), (TD7, TD7Config)])
def test_agents_of_td3_have_them_too(agent, config, network, body):
    sizes = {"network": network, "hidden_sizes": (8,), "critic_hidden_sizes": (6, 6), "num_critics": 2}
    made = agent(config(**sizes)).make_networks(WALKER)
    bodies = [made.policy.body, *made.critics.heads]
    assert [type(each).__name__ for each in bodies] == [body] * 3
    assert [next(each.parameters()).shape[0] for each in bodies] == [8, 6, 6]
    assert (type(made.policy.head.actions).__name__ == "Linear") == (network == "simba")
