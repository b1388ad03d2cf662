"""Networks as plain functions, for acting: calls of modules cost more than the math of a small network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from framework.networks.distributions import Categorical
from framework.networks.heads import CategoricalHead
from framework.networks.torsos import MLP, ObservationEncoder

_FUNCTIONS: dict[type[nn.Module], Callable[[Any], Any]] = {
    nn.Tanh: torch.tanh,
    nn.ReLU: torch.relu,
    nn.ELU: nn.functional.elu,
    nn.SiLU: nn.functional.silu,
    nn.Identity: lambda inputs: inputs,
}


def plain(module: nn.Module) -> Callable[[Any], Any]:
    """A function equal to `module(inputs)`, without the calls of inner modules where possible.

    It expands MLPs and their parts, encoders of one vector, and categorical heads. It calls all other
    modules, and modules with hooks, as they are. The function reads the module's parameters, so in-place
    changes, such as loading a state dict, take effect. Modules or hooks that are replaced or added later do
    not.
    """
    if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return module
    if type(module) in _FUNCTIONS:
        return _FUNCTIONS[type(module)]
    if type(module) is nn.Linear:
        linear, weight, bias = nn.functional.linear, module.weight, module.bias
        return lambda inputs: linear(inputs, weight, bias)
    if type(module) is MLP:
        return _chain([plain(layer) for layer in module.layers])
    if type(module) is ObservationEncoder and module.is_vector:
        return torch.Tensor.float
    if type(module) is CategoricalHead:
        logits = plain(module.logits)
        return lambda features: Categorical(logits(features))
    return module


def _chain(functions: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def call(inputs: Any) -> Any:
        for function in functions:
            inputs = function(inputs)
        return inputs

    return call
