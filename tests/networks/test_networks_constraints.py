"""Layers with constraints: what they compute, and that every kind of optimizer step restores them."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

from framework import learners, networks
from framework.learners import LossOutput, MinibatchLearner, Prepared, SGDLearner


def test_a_spectral_convolution_has_the_singular_value_1():
    torch.manual_seed(0)
    layer = networks.SpectralConv2d(2, 3, 3, padding=1)
    images = torch.randn(2, 2, 5, 5)
    with torch.no_grad():
        layer.weight.mul_(torch.linspace(1.0, 7.0, 3).reshape(3, 1, 1, 1))
        for _ in range(40):
            layer.constrain()
    largest = np.linalg.svd(layer.weight.detach().reshape(3, 18), compute_uv=False)[0]
    expected = nn.functional.conv2d(images, layer.weight / float(largest), layer.bias, padding=1)
    torch.testing.assert_close(layer(images), expected, rtol=1e-4, atol=1e-5)
    # The gradient passes through the singular value: it does not lengthen the weights.
    layer(images).square().sum().backward()
    assert abs((layer.weight.grad * layer.weight).sum().item()) < 1e-3 * layer.weight.grad.norm().item()


class Nets(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(networks.SphereLinear(4, 6), nn.ReLU(), networks.SphereLinear(6, 2))


def loss(nets, batch, context):
    return LossOutput((nets.body(batch["x"]) - 5.0).square().mean(), {})


def by_gradients(learner, batch):
    learner.apply(learner.gradients(batch))


OPTIMIZER = functools.partial(learners.Adam, lr=0.3)
LEARNERS = {
    "sgd": (SGDLearner, {}, SGDLearner.step),
    "gradients": (SGDLearner, {}, by_gradients),
    "minibatches": (MinibatchLearner, {"epochs": 2, "minibatch_size": 4}, MinibatchLearner.step),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_each_step_restores_the_norms(name):
    made, settings, step = LEARNERS[name]
    nets, batch = Nets(), {"x": torch.randn(8, 4)}
    before = copy.deepcopy(nets.state_dict())
    functions = (lambda nets, batch, context: Prepared(batch, 8, {}), loss)
    learner = made(nets, *functions[-1 if made is SGDLearner else 0 :], OPTIMIZER, **settings)
    for _ in range(3):
        step(learner, batch)
    for key, weight in nets.state_dict().items():
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(len(weight)))
        assert (weight - before[key]).abs().max() > 0.1
