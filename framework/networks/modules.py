"""Modules that are quick to call: a small network takes longer to be called than to compute.

They are torch's in every respect but time. A policy that acts for eight envs spends a tenth of its time in
torch's calls of modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import LayerNorm as TorchLayerNorm
from torch.nn import Linear as TorchLinear
from torch.nn import Module as TorchModule
from torch.nn import ReLU as TorchReLU
from torch.nn import Tanh as TorchTanh
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)


def has_hooks(module: TorchModule) -> bool:
    """Whether a call of `module` does more than a call of its `forward`: it has hooks, or was compiled."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    )


class Module(TorchModule):
    """A module whose call is a call of its `forward`, unless it has hooks or was compiled."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if has_hooks(self):
            return super().__call__(*inputs, **options)
        return self.forward(*inputs, **options)

    def settle(self) -> None:
        """Decides how to call its children without gradients; see `settle`."""


def settle(networks: TorchModule) -> None:
    """Decides how the modules in `networks` call each other without gradients, until this is called again.

    A child without hooks is called by its `forward`. A hook that comes later counts from then on.
    """
    for module in networks.modules():
        if isinstance(module, Module):
            module.settle()


def call_of(module: TorchModule) -> Callable[..., Any]:
    """What to call in place of `module`: its `forward`, if it has no hooks."""
    known = type(module).__call__ in (TorchModule.__call__, Module.__call__)
    return module.forward if known and not has_hooks(module) else module


class ReLU(Module, TorchReLU):
    forward = staticmethod(torch.relu)


class Tanh(Module, TorchTanh):
    forward = staticmethod(torch.tanh)


class LayerNorm(Module, TorchLayerNorm):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        own: Any = self._parameters
        if "weight" in own and "bias" in own:
            return torch.layer_norm(inputs, self.normalized_shape, own["weight"], own["bias"], self.eps)
        return super().forward(inputs)


class Linear(Module, TorchLinear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        own: Any = self._parameters
        if "weight" in own and "bias" in own:
            return nn.functional.linear(inputs, own["weight"], own["bias"])
        return super().forward(inputs)  # They are computed, as by `torch.nn.utils.parametrize`.
