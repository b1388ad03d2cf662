"""Networks for quantiles of the return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from framework.networks.heads import QNetwork
from framework.networks.modules import Linear
from framework.types import Nest


class ImplicitQuantileNetwork(QNetwork):
    """Quantiles of the return of all discrete actions: observation `[N, *]` to `[N, num_actions, K]`.

    A fraction `tau` becomes the features `relu(linear(cos(pi i tau)))`, with i from 0 to `num_cosines` - 1.
    They are multiplied with the features of the observation (Dabney et al., 2018b, equation 4). The last
    hidden layer comes after this product, the others before it.

    Args:
      observation_spec: nest of dm_env specs of one env.
      num_actions: A, the number of actions.
      fractions: the fractions used where `forward` is given none.
      hidden_sizes: widths of the hidden layers. With `dueling`, each stream has its own last one.
      dueling: whether the value and the advantages have separate streams.
      layer_norm: normalizes each hidden layer before its activation.
      noise: initial noise of the layers after the encoder, except the fractions' layer, as in `MLP`.
      num_cosines: number of cosines of a fraction.
      torso: network for images, as in `make_torso`.
      torso_size: its size, as in `make_torso`.
    """

    fractions: torch.Tensor
    frequencies: torch.Tensor

    def __init__(
        self,
        observation_spec: Nest,
        num_actions: int,
        fractions: Sequence[float],
        hidden_sizes: Sequence[int] = (256, 256),
        dueling: bool = False,
        layer_norm: bool = False,
        noise: float = 0.0,
        num_cosines: int = 64,
        torso: str = "nature",
        torso_size: int | None = None,
    ):
        # Both streams of a dueling network have their last hidden layer after the product.
        settings: Any = {"noise": noise, "torso": torso, "torso_size": torso_size}
        super().__init__(observation_spec, num_actions, hidden_sizes, True, layer_norm, **settings)
        if not dueling:
            self.value = None
        self.embedding = Linear(num_cosines, self.body.output_size)
        # Neither saved nor published: they follow from the config.
        self.register_buffer("fractions", torch.tensor(fractions).unsqueeze(0), persistent=False)
        self.register_buffer("frequencies", math.pi * torch.arange(num_cosines), persistent=False)

    def forward(self, observation: Nest, fractions: torch.Tensor | None = None) -> torch.Tensor:
        """The quantiles at `fractions`: `[N, K]`, or `[1, K]` for the same ones in all rows."""
        features = self.body(self.encoder(observation))
        fractions = self.fractions if fractions is None else fractions
        # [K, N, ...], since the noise of noisy layers is [N, ...].
        cosines = torch.cos(fractions.T.unsqueeze(-1) * self.frequencies)
        features = features * self.embedding(cosines).relu()
        advantages = self.head(features)
        if self.value is not None:
            advantages = self.value(features) + advantages - advantages.mean(-1, keepdim=True)
        return advantages.permute(1, 2, 0)
