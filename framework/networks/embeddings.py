"""Embeddings of observations and actions that predict the next one's: SALE (Fujimoto et al., 2023)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from framework.networks.bodies import MakeBody
from framework.networks.control import DeterministicHead, fitted
from framework.networks.modules import Linear, Module
from framework.networks.torsos import MLP, ObservationEncoder
from framework.types import Nest


def avg_l1_norm(inputs: torch.Tensor, epsilon: float = 1e-8) -> torch.Tensor:
    """Divides each vector `[..., F]` by the mean size of its entries (Fujimoto et al., 2023, section 4.1).

    It preserves the scale of features that are learned without a fixed target, and of the inputs next to
    them.
    """
    return inputs / inputs.abs().mean(-1, keepdim=True).clamp(min=epsilon)


class StateActionEmbeddings(Module):
    """Embeddings of observations, z^s = f(s), and of actions in them, z^sa = g(z^s, a).

    Args:
      observation_spec: nest of dm_env specs of one env.
      action_size: D, width of the action `[..., D]`.
      size: Z, width of both embeddings.
      hidden_sizes: widths of the hidden layers of f and of g, with an ELU after each.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_size: int,
        size: int = 256,
        hidden_sizes: Sequence[int] = (256, 256),
    ):
        super().__init__()
        self.encoder = ObservationEncoder(observation_spec)
        self.of_features = MLP(self.encoder.output_size, hidden_sizes, size, activation="elu")
        self.of_action = MLP(size + action_size, hidden_sizes, size, activation="elu")

    def state(self, observation: Nest) -> torch.Tensor:
        """Observations `[..., *]` to z^s `[..., Z]`, whose entries have a mean size of 1."""
        return avg_l1_norm(self.of_features(self.encoder(observation)))

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """z^s `[..., Z]` and actions `[..., D]` to z^sa `[..., Z]`."""
        return self.of_action(torch.cat([state, action], -1))


class _Embedded(Module):
    """Holds its own frozen copy of embeddings, so that its inputs do not drift while it learns."""

    def __init__(self, embeddings: StateActionEmbeddings):
        super().__init__()
        self.embeddings = copy.deepcopy(embeddings).requires_grad_(False)

    @torch.no_grad()
    def renew(self, embeddings: StateActionEmbeddings) -> None:
        """Copies the embeddings that have been learned since."""
        pairs = zip(self.embeddings.parameters(), embeddings.parameters(), strict=True)
        for own, learned in pairs:
            own.copy_(learned)


class EmbeddedPolicy(_Embedded):
    """Deterministic policy that also sees the embedding: observation `[..., *]` to `[..., D]` in [-1, 1].

    Args:
      observation_spec: nest of dm_env specs of one env.
      action_size: D.
      embeddings: the embeddings that it copies.
      hidden_sizes: widths of the hidden layers. Before them, a linear layer of the
        first width makes features of the observation.
      make_body: makes the hidden layers, such as `networks.make_body`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_size: int,
        embeddings: StateActionEmbeddings,
        hidden_sizes: Sequence[int] = (256, 256),
        make_body: MakeBody = MLP,
    ):
        super().__init__(embeddings)
        self.encoder = ObservationEncoder(observation_spec)
        self.features = Linear(self.encoder.output_size, hidden_sizes[0])
        width = hidden_sizes[0] + embeddings.of_features.output_size
        self.body = make_body(width, hidden_sizes)
        self.head = fitted(DeterministicHead(self.body.output_size, action_size), self.body)

    def forward(self, observation: Nest) -> torch.Tensor:
        features = avg_l1_norm(self.features(self.encoder(observation)))
        return self.head(self.body(torch.cat([features, self.embeddings.state(observation)], -1)))


class EmbeddedCritics(_Embedded):
    """Values of an action, from observation, action and their embeddings: to `[count, ...]`.

    Args:
      observation_spec: nest of dm_env specs of one env.
      action_size: D, width of the action `[..., D]`.
      embeddings: the embeddings that they copy.
      hidden_sizes: widths of the hidden layers of each critic. Before them, a linear
        layer of the first width makes features of observation and action.
      count: number of critics.
      make_body: makes the hidden layers and the output of each.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_size: int,
        embeddings: StateActionEmbeddings,
        hidden_sizes: Sequence[int] = (256, 256),
        count: int = 2,
        make_body: MakeBody = MLP,
    ):
        super().__init__(embeddings)
        encoders = [ObservationEncoder(observation_spec) for _ in range(count)]
        self.encoders = nn.ModuleList(encoders)
        inputs, width = encoders[0].output_size + action_size, hidden_sizes[0]
        self.features = nn.ModuleList(Linear(inputs, width) for _ in range(count))
        width += 2 * embeddings.of_features.output_size
        self.heads = nn.ModuleList(make_body(width, hidden_sizes, 1) for _ in range(count))

    def forward(self, observation: Nest, action: torch.Tensor) -> torch.Tensor:
        state = self.embeddings.state(observation)
        embedded = [self.embeddings(state, action), state]
        values = []
        for encoder, features, head in zip(self.encoders, self.features, self.heads, strict=True):
            own = features(torch.cat([encoder(observation), action], -1))
            values.append(head(torch.cat([avg_l1_norm(own), *embedded], -1)))
        return torch.stack(values).squeeze(-1)
