"""Modules that are quick to call: a small network takes longer to be called than to compute.

They are torch's in every respect but time. A policy that acts for eight envs spends a tenth of its time in
torch's calls of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    _is_quick = False  # Whether it had no hooks when it settled.
    _calls: Sequence[Callable[..., Any]] = ()  # How it then calls the layers of its `layers`.

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if (torch.is_grad_enabled() or not self._is_quick) and has_hooks(self):
            return super().__call__(*inputs, **options)
        return self.forward(*inputs, **options)


def settle(networks: TorchModule) -> None:
    """Decides how the modules in `networks` are called without gradients, until this is called again.

    One without hooks is called by its `forward`. A hook that comes later counts from the next time on.
    """
    usual = TorchModule.__call__, Module.__call__
    for module in networks.modules():
        if isinstance(module, Module):
            module._is_quick = not has_hooks(module)
            layers = module._modules.get("layers")
            module._calls = [
                layer.forward if type(layer).__call__ in usual and not has_hooks(layer) else layer
                for layer in (layers if isinstance(layers, nn.Sequential) else ())
            ]


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
