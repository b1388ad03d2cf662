"""Networks with a memory, for sequences from replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import tree
from dm_env import specs as dm_specs

from framework.networks import inputs
from framework.networks.heads import QNetwork
from framework.networks.modules import Module
from framework.networks.torsos import CONVOLUTIONS, NatureConv, ObservationEncoder, RecurrentCore
from framework.types import Nest

State = tuple[torch.Tensor, ...]


class RecurrentEncoder(Module):
    """Features of observations with a memory: encoder and optional LSTM.

    Args:
      observation_spec: nest of dm_env specs of one env.
      hidden_sizes: widths of the layers before the LSTM, for observations without images.
      lstm_size: width of the LSTM; None leaves it out.
      activation: activation of the layers before it.
      make_convolution: as in `ObservationEncoder`.
      lstm_layers: number of layers of the LSTM.

    Attributes:
      output_size: F, the width of the features.
    """

    def __init__(
        self,
        observation_spec: Nest,
        hidden_sizes: Sequence[int] = (64,),
        lstm_size: int | None = 64,
        activation: str = "relu",
        make_convolution: Callable[[Sequence[int]], Any] = NatureConv,
        lstm_layers: int = 1,
    ):
        super().__init__()
        has_images = any(each.kind == inputs.PICTURE for each in inputs.inputs_of(observation_spec))
        sizes = () if has_images else hidden_sizes
        self.torso = ObservationEncoder(observation_spec, sizes, activation, make_convolution)
        width = self.torso.output_size
        self.core = None if lstm_size is None else RecurrentCore(width, lstm_size, layers=lstm_layers)
        self.output_size = lstm_size or width

    def initial_state(self, batch_size: int) -> State:
        """The LSTM's state `[B, lstm_size]` at the start of an episode; `()` without an LSTM."""
        return () if self.core is None else self.core.initial_state(batch_size)

    def step(self, observation: Nest, state: State) -> tuple[torch.Tensor, State]:
        """One step of acting: `[B, ...]` to features `[B, F]` and the next state."""
        features = self.torso(observation)
        return (features, state) if self.core is None else self.core.step(features, state)

    def unroll(
        self, observation: Nest, state: State, start_of_episode: torch.Tensor, burn_in: int = 0
    ) -> torch.Tensor:
        """Features `[N, T - burn_in, F]` of the rows `[N, T, ...]` after the burn-in.

        Args:
          observation: observations of the rows.
          state: state before the first row, as the actor had it.
          start_of_episode: bool`[N, T]`; where True, the state restarts before that row.
          burn_in: number of rows that only bring the state up to date, without gradients.
        """
        if self.core is not None and burn_in:
            with torch.no_grad():
                features = self.torso(tree.map_structure(lambda leaf: leaf[:, :burn_in], observation))
                _, state = self.core.unroll(features, state, start_of_episode[:, :burn_in])
        features = self.torso(tree.map_structure(lambda leaf: leaf[:, burn_in:], observation))
        if self.core is not None:
            features, _ = self.core.unroll(features, state, start_of_episode[:, burn_in:])
        return features


class RecurrentQNetwork(RecurrentEncoder):
    """Values of all discrete actions with a memory: a `RecurrentEncoder` and a `QNetwork`.

    `step` and `unroll` give values `[..., A]` in place of features.

    Args:
      observation_spec: nest of dm_env specs of one env.
      num_actions: A, the number of actions.
      hidden_sizes: widths of the layers before the LSTM, for observations without images.
      lstm_size: width of the LSTM; None leaves it out.
      head_sizes: widths of the hidden layers after it.
      dueling: whether the value and the advantages have separate streams.
      torso: network for images, one of `CONVOLUTIONS`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        num_actions: int,
        hidden_sizes: Sequence[int] = (64,),
        lstm_size: int | None = 64,
        head_sizes: Sequence[int] = (64,),
        dueling: bool = True,
        torso: str = "nature",
    ):
        super().__init__(observation_spec, hidden_sizes, lstm_size, make_convolution=CONVOLUTIONS[torso])
        features = dm_specs.Array((self.output_size,), "float32")
        self.head = QNetwork(features, num_actions, head_sizes, dueling)

    def step(self, observation: Nest, state: State) -> tuple[torch.Tensor, State]:
        features, state = super().step(observation, state)
        return self.head(features), state

    def unroll(
        self, observation: Nest, state: State, start_of_episode: torch.Tensor, burn_in: int = 0
    ) -> torch.Tensor:
        return self.head(super().unroll(observation, state, start_of_episode, burn_in))
