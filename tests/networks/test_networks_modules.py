"""Modules that are quick to call: where torch's do more than call `forward`, these do it too."""

import copy

import pytest
import torch
from torch import nn

from framework.networks import ACTIVATIONS, MLP
from framework.networks.modules import settle

INPUTS = torch.ones(2, 3)


def halved_by_a_hook(mlp):
    mlp.layers[0].register_forward_hook(lambda module, inputs, output: output / 2)


def halved_by_a_hook_of_all(mlp):
    def halve(module, inputs, output):
        return output / 2 if module is mlp.layers[0] else None

    return nn.modules.module.register_module_forward_hook(halve)


class Half(nn.Module):
    def forward(self, parameter):
        return parameter / 2


def halved_by_a_parametrization(mlp):
    for name in ("weight", "bias"):
        nn.utils.parametrize.register_parametrization(mlp.layers[0], name, Half())


@pytest.mark.parametrize("change", [halved_by_a_hook, halved_by_a_hook_of_all, halved_by_a_parametrization])
def test_hooks_and_parametrizations_count(change):
    mlp = MLP(3, (), 2)
    before, handle = mlp(INPUTS), change(mlp)
    torch.testing.assert_close(mlp(INPUTS), before / 2)
    if handle is not None:
        handle.remove()


def test_a_normalization_with_a_parametrization():
    mlp = MLP(3, (2,), layer_norm=True)
    before = mlp(INPUTS)
    for name in ("weight", "bias"):
        nn.utils.parametrize.register_parametrization(mlp.layers[1], name, Half())
    torch.testing.assert_close(mlp(INPUTS), before / 2)


def test_other_parameters_for_one_call():
    mlp = MLP(3, (), 2)
    zeros = {name: torch.zeros_like(value) for name, value in mlp.named_parameters()}
    assert not torch.func.functional_call(mlp, zeros, (INPUTS,)).any()


@torch.no_grad()
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_settled_modules_compute_the_same(activation, layer_norm):
    mlp = MLP(3, (4, 5), 2, activation, layer_norm=layer_norm)
    plain = nn.Sequential(*(twin(layer) for layer in mlp.layers))
    torch.testing.assert_close(mlp(INPUTS), plain(INPUTS))
    settle(mlp)
    assert torch.equal(mlp(INPUTS), plain(INPUTS))
    copied = copy.deepcopy(mlp)
    nn.init.zeros_(copied.layers[-1].weight)
    assert torch.equal(copied(INPUTS), copied.layers[-1].bias.expand(2, 2))
    assert torch.equal(mlp(INPUTS), plain(INPUTS))  # It has layers of its own.
    zeros = {name: torch.zeros_like(value) for name, value in mlp.named_parameters()}
    assert not torch.func.functional_call(mlp, zeros, (INPUTS,)).any()


def twin(layer):
    """The same layer of torch's class."""
    known = next(base for base in type(layer).mro() if base.__module__.startswith("torch."))
    other = copy.copy(layer)
    other.__class__ = known
    return other


@torch.no_grad()
@pytest.mark.parametrize("change", [halved_by_a_hook, halved_by_a_hook_of_all])
def test_settled_modules_get_hooks_when_they_settle_again_and_learning_gets_them_at_once(change):
    mlp = MLP(3, (), 2)
    settle(mlp)
    before, handle = mlp(INPUTS), change(mlp)
    with torch.enable_grad():
        torch.testing.assert_close(mlp(INPUTS), before / 2)
    assert torch.equal(mlp(INPUTS), before)
    settle(mlp)
    torch.testing.assert_close(mlp(INPUTS), before / 2)
    if handle is not None:
        handle.remove()
