"""Networks as plain functions, for acting: a small network takes longer to be called than to compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from framework.networks.distributions import Categorical
from framework.networks.encoders import ObservationEncoder
from framework.networks.heads import CategoricalHead
from framework.networks.mlp import MLP

_FUNCTIONS: dict[type[nn.Module], Callable[[Any], Any]] = {
    nn.Tanh: torch.tanh,
    nn.ReLU: torch.relu,
    nn.ELU: nn.functional.elu,
    nn.SiLU: nn.functional.silu,
    nn.Identity: lambda inputs: inputs,
}


def plain(module: nn.Module) -> Callable[[Any], Any]:
    """What `module(inputs)` gives, without the calls of modules in between where it is known how.

    Known are MLPs and what they consist of, encoders of one vector, and categorical heads; anything else, and
    what has hooks, is called as it is. The function reads the module's own parameters, so it follows changes
    in place, such as loading a state dict. It does not see modules that are exchanged, or hooks added, later.
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
