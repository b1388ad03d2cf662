"""Dropout and batch renormalization: what they compute in a block, and outside of one."""

import copy

import numpy as np
import pytest
import torch

from framework.networks import MLP, BatchRenorm, Dropout, batch_statistics, dropout


@pytest.mark.parametrize("warm_up", [0, 3])
def test_batch_renormalization_against_its_algorithm(warm_up):
    random, layer = np.random.default_rng(0), BatchRenorm(2, momentum=0.9, warm_up=warm_up)
    layer.weight.data[:], layer.bias.data[:] = torch.tensor([2.0, 0.5]), torch.tensor([1.0, -1.0])
    mean, variance = np.zeros(2), np.ones(2)
    for step in range(6):
        # Far apart, so that both corrections reach their limits in some steps, and not in others.
        x = random.normal(0.1, 1.2, (8, 2)) * 10.0 ** (step % 3 - 1)
        inputs = torch.tensor(x, dtype=torch.float32, requires_grad=True)
        with batch_statistics(layer):
            found = layer(inputs)
        own_mean, own_std, std = x.mean(0), np.sqrt(x.var(0) + 1e-3), np.sqrt(variance + 1e-3)
        r, d = np.clip(own_std / std, 1 / 3, 3.0), np.clip((own_mean - mean) / std, -5.0, 5.0)
        if step < warm_up:
            r, d = np.ones(2), np.zeros(2)
        expected = ((x - own_mean) / own_std * r + d) * [2.0, 0.5] + [1.0, -1.0]
        np.testing.assert_allclose(found.detach(), expected, rtol=1e-4, atol=1e-4)
        # The batch's own mean and deviation have gradients, and the corrections have none.
        weights, again = torch.tensor(random.normal(size=(8, 2))), torch.tensor(x, requires_grad=True)
        normal = (again - again.mean(0)) / (again.var(0, correction=0) + 1e-3).sqrt()
        (weights * normal * torch.tensor(r * [2.0, 0.5])).sum().backward()
        (weights * found).sum().backward()
        np.testing.assert_allclose(inputs.grad, again.grad, rtol=1e-3, atol=1e-4)
        mean, variance = 0.9 * mean + 0.1 * own_mean, 0.9 * variance + 0.1 * x.var(0)
    # Acting uses the running statistics, and leaves them alone.
    outside, before = layer(inputs), copy.deepcopy(layer.state_dict())
    known = (x - mean) / np.sqrt(variance + 1e-3) * [2.0, 0.5] + [1.0, -1.0]
    np.testing.assert_allclose(outside.detach(), known, rtol=1e-4, atol=1e-3)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert before["batches"].item() == 6


def test_dropout_drops_by_the_numbers_it_is_given_within_a_block_only():
    layer, inputs = Dropout(0.25), torch.tensor([[1.0, 2.0, 3.0]])
    with dropout([layer], lambda like: torch.tensor([[0.24, 0.25, 0.9]])):
        assert layer(inputs).tolist() == [[0.0, pytest.approx(8 / 3), 4.0]]
    assert layer(inputs) is inputs


def test_layers_are_in_the_order_of_the_papers():
    layers = MLP(3, (4,), 1, layer_norm=True, dropout=0.1, batch_renorm=True).layers
    names = [type(layer).__name__ for layer in layers]
    assert names == ["BatchRenorm", "Linear", "Dropout", "LayerNorm", "ReLU", "BatchRenorm", "Linear"]
