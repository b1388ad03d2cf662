"""Embeddings of observations and actions: their scale, and the copies of policy and critics."""

import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs

from framework import networks

OBSERVATIONS = {"image": dm_specs.Array((8, 8, 1), np.uint8), "position": dm_specs.Array((3,), np.float32)}


def observe(count):
    return {
        "image": torch.randint(0, 255, (count, 8, 8, 1), dtype=torch.uint8),
        "position": torch.randn(count, 3),
    }


def test_avg_l1_norm_by_hand():
    rows = torch.tensor([[1.0, -3.0], [0.0, 0.0], [0.5, 0.5]])
    assert networks.avg_l1_norm(rows).tolist() == [[0.5, -1.5], [0.0, 0.0], [1.0, 1.0]]


@pytest.fixture
def embeddings():
    torch.manual_seed(0)
    return networks.StateActionEmbeddings(OBSERVATIONS, 2, size=5, hidden_sizes=(7,))


def test_an_observation_has_an_embedding_of_mean_size_one(embeddings):
    state = embeddings.state(observe(4))
    assert state.shape == (4, 5)
    torch.testing.assert_close(state.abs().mean(-1), torch.ones(4))


@pytest.mark.parametrize("kind", ["policy", "critics"])
def test_copies_stay_as_they_are_until_they_are_renewed(embeddings, kind):
    make = networks.EmbeddedPolicy if kind == "policy" else networks.EmbeddedCritics
    module, observation = make(OBSERVATIONS, 2, embeddings, (6,)), observe(4)
    inputs = (observation,) if kind == "policy" else (observation, torch.zeros(4, 2))
    before = module(*inputs)
    with torch.no_grad():
        for parameter in embeddings.parameters():
            parameter += 0.5
    assert torch.equal(module(*inputs), before)
    module.renew(embeddings)
    assert not torch.equal(module(*inputs), before)
    # What policy and critics learn moves neither the copies nor the embeddings.
    module(*inputs).sum().backward()
    assert all(p.grad is None for p in [*embeddings.parameters(), *module.embeddings.parameters()])


def test_the_value_has_a_slope_along_the_action_through_its_embedding_too(embeddings):
    critics = networks.EmbeddedCritics(OBSERVATIONS, 2, embeddings, (6,))
    with torch.no_grad():  # No direct way from the action to the value.
        for features in critics.features:
            features.weight[:, -2:] = 0.0
    action = torch.zeros(4, 2, requires_grad=True)
    critics(observe(4), action).sum().backward()
    assert action.grad.abs().min() > 0
