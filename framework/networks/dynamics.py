"""An ensemble of models of an environment's dynamics, rewards and ends of episodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from framework.networks.modules import Module


class DynamicsEnsemble(Module):
    """K models: inputs `[K, N, D + A]` to predictions `[K, N, D + 2]`, in units of the scaled data.

    An input is an observation and an action's vector. What is predicted is the change of the observation, the
    reward, and the discount. Each model has its own entry of every parameter: `torch.func.vmap` over the
    parameters evaluates one model, whose inputs are `[N, D + A]`.

    Args:
      observation_size: D.
      action_size: A.
      hidden_sizes: widths of the hidden layers.
      count: K.

    Attributes:
      starts: `[S, D]`, observations of the data, from which to imagine.
      is_fitted: whether there were data.
    """

    moments: torch.Tensor
    starts: torch.Tensor

    def __init__(self, observation_size: int, action_size: int, hidden_sizes: Sequence[int], count: int):
        super().__init__()
        self.sizes = observation_size + action_size, observation_size + 2
        widths = [self.sizes[0], *hidden_sizes, self.sizes[1]]
        layers = list(itertools.pairwise(widths))
        self.weights = nn.ParameterList(
            torch.empty(count, *layer).uniform_(-1, 1) / layer[0] ** 0.5 for layer in layers
        )
        self.biases = nn.ParameterList(torch.zeros(count, 1, layer[1]) for layer in layers)
        # Means and standard deviations of the inputs and of what is predicted. 0: there are no data yet.
        self.register_buffer("moments", torch.zeros(2, sum(self.sizes)))
        self.register_buffer("starts", torch.zeros(1_000, observation_size))

    @property
    def is_fitted(self) -> bool:
        return bool(self.moments[1, 0] > 0)

    def observe(self, data: Sequence[torch.Tensor], random: torch.Generator) -> None:
        """Takes scales and starts from all inputs `[N, D + A]` and targets `[N, D + 2]`."""
        rows = torch.cat([*data], -1)
        self.moments.copy_(torch.stack([rows.mean(0), rows.std(0, correction=0).clamp(min=1e-6)]))
        drawn = torch.randint(len(rows), self.starts.shape[:1], generator=random, device=rows.device)
        self.starts.copy_(rows[drawn, : self.starts.shape[1]])

    def scaled(self, data: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs and targets in units of their standard deviations, from their means, at most 10 of them.

        Discounts have no limit: an end of 1 in 400 transitions is 20 standard deviations from their mean.
        """
        mean, std = (each.split(self.sizes) for each in self.moments)
        inputs, targets = ((each - m) / s for each, m, s in zip(data, mean, std, strict=True))
        numbers, discounts = targets[:, :-1], targets[:, -1:]
        return [inputs.clamp(-10.0, 10.0), torch.cat([numbers.clamp(-10.0, 10.0), discounts], -1)]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        *hidden, last = zip(self.weights, self.biases, strict=True)
        for weight, bias in hidden:
            inputs = torch.relu(inputs @ weight + bias)
        return inputs @ last[0] + last[1]

    def predict(
        self, observations: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Next observations `[..., D]`, rewards and discounts `[...]`, the latter 0 or 1, in their units."""
        mean, std = (each.split(self.sizes) for each in self.moments)
        inputs = (torch.cat([observations, actions], -1) - mean[0]) / std[0]
        predicted = self(inputs.clamp(-10.0, 10.0)) * std[1] + mean[1]
        change, reward, discount = predicted.split([self.sizes[1] - 2, 1, 1], -1)
        return observations + change, reward.squeeze(-1), (discount.squeeze(-1) > 0.5).float()
