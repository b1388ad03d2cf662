"""Modules that are quick to call: where torch's do more than call `forward`, these do it too."""

import pytest
import torch
from torch import nn

from framework.networks import MLP

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


def test_other_parameters_for_one_call():
    mlp = MLP(3, (), 2)
    zeros = {name: torch.zeros_like(value) for name, value in mlp.named_parameters()}
    assert not torch.func.functional_call(mlp, zeros, (INPUTS,)).any()
