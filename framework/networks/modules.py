"""Modules that are quick to call: a small network takes longer to be called than to compute.

They are torch's in every respect but time. A policy that acts for eight envs spends a tenth of its time in
torch's calls of modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import Linear as TorchLinear
from torch.nn import Module as TorchModule
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)


class Module(TorchModule):
    """A module whose call is a call of its `forward`, unless it has hooks or was compiled."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or self._compiled_call_impl
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or _global_backward_hooks
            or _global_backward_pre_hooks
        ):
            return super().__call__(*inputs, **options)
        return self.forward(*inputs, **options)


class Linear(Module, TorchLinear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        own: Any = self._parameters
        if "weight" in own and "bias" in own:
            return nn.functional.linear(inputs, own["weight"], own["bias"])
        return super().forward(inputs)  # They are computed, as by `torch.nn.utils.parametrize`.
