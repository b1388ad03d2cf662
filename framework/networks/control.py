"""Parts of agents for continuous control: policies and their critics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from framework.networks.bodies import MakeBody, SimBaV2
from framework.networks.distributions import DiagonalGaussian
from framework.networks.heads import SquashedGaussianHead
from framework.networks.masks import masked_policy
from framework.networks.modules import Linear, Module
from framework.networks.torsos import MLP, ObservationEncoder, in_float32, orthogonal_
from framework.types import Nest


class PolicyNetwork(Module):
    """Encoder, hidden layers and a head: observation `[..., *]` to what the head makes of the features.

    Args:
      observation_spec: nest of dm_env specs of one env.
      hidden_sizes: widths of the hidden layers.
      make_head: width of the features to the head, such as `Actions.make_head`.
      make_body: makes the hidden layers, such as `networks.make_body`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        hidden_sizes: Sequence[int],
        make_head: Callable[[int], nn.Module],
        make_body: MakeBody = MLP,
    ):
        super().__init__()
        self.encoder = ObservationEncoder(observation_spec)
        self.body = make_body(self.encoder.output_size, hidden_sizes)
        self.head = fitted(make_head(self.body.output_size), self.body)

    def forward(self, observation: Nest) -> Any:
        return masked_policy(self.head, self.body(self.encoder(observation)), observation)


def fitted(head: nn.Module, body: nn.Module) -> nn.Module:
    """`head`, with the last layers of `SimBaV2` in place of linear ones where it follows such a body."""
    parts = 2 if isinstance(head, SquashedGaussianHead) else 1  # Mean and standard deviation.
    for name, layer in list(head.named_children()) if isinstance(body, SimBaV2) else ():
        if isinstance(layer, Linear):
            setattr(head, name, SimBaV2.make_output(layer.in_features, layer.out_features, parts))
    return head


class DeterministicHead(Module):
    """`[..., input_size]` to actions `[..., size]` between -1 and 1, by a tanh (Lillicrap et al., 2016).

    The last layer begins with weights between -0.003 and 0.003, as in the paper: the first actions are near
    0, where the tanh passes gradients.
    """

    def __init__(self, input_size: int, size: int):
        super().__init__()
        self.actions = Linear(input_size, size)
        for parameter in self.actions.parameters():
            nn.init.uniform_(parameter, -3e-3, 3e-3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        # In bfloat16, tanh(3.5) is 1 and passes no gradient.
        return torch.tanh(in_float32(self.actions, features))


class SoftplusGaussianHead(Module):
    """`[..., input_size]` to a `DiagonalGaussian` whose mean and standard deviation depend on the features.

    The standard deviation is a scaled softplus, as in Acme's MPO. A small last layer makes the first mean
    nearly 0 and the first standard deviation nearly `initial_std`, whatever the features are.

    Args:
      input_size: width of the features.
      size: D, the number of action dimensions.
      initial_std: initial standard deviation.
    """

    _LEAST = 1e-4  # Smallest standard deviation.

    def __init__(self, input_size: int, size: int, initial_std: float = 1.0):
        super().__init__()
        self.both = Linear(input_size, 2 * size)
        orthogonal_(self.both, 0.01)
        self._scale = initial_std / math.log(2.0)  # softplus(0) is log 2.

    def forward(self, features: torch.Tensor) -> DiagonalGaussian:
        mean, raw = in_float32(self.both, features).chunk(2, -1)
        return DiagonalGaussian(mean, (self._scale * nn.functional.softplus(raw) + self._LEAST).log())


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Restores the parameters and buffers of `module` at the end."""
    initial = copy.deepcopy(module.state_dict())
    try:
        yield
    finally:
        module.load_state_dict(initial)


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Detaches the parameters of `module`. Gradients still pass through it to its inputs.

    Not for torch's recurrent layers, which keep their parameters in a second place.
    """
    kept = [
        (layer, name, parameter)
        for layer in module.modules()
        for name, parameter in layer._parameters.items()
        if parameter is not None
    ]
    for layer, name, parameter in kept:  # `requires_grad_` could not be compiled.
        layer._parameters[name] = parameter.detach()  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, name, parameter in kept:
            layer._parameters[name] = parameter
