"""Networks of action values with a memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import tree
from dm_env import specs as dm_specs
from torch import nn

from framework.networks.heads import QNetwork
from framework.networks.torsos import ObservationEncoder, RecurrentCore
from framework.types import Nest

State = tuple[torch.Tensor, ...]


class RecurrentQNetwork(nn.Module):
    """Values of all discrete actions with a memory: encoder, optional LSTM, and a `QNetwork`.

    Args:
      observation_spec: nest of dm_env specs of one env.
      num_actions: A, the number of actions.
      hidden_sizes: widths of the layers before the LSTM, for observations without images.
      lstm_size: width of the LSTM; None leaves it out.
      head_sizes: widths of the hidden layers after it.
      dueling: whether the value and the advantages have separate streams.
    """

    def __init__(
        self,
        observation_spec: Nest,
        num_actions: int,
        hidden_sizes: Sequence[int] = (64,),
        lstm_size: int | None = 64,
        head_sizes: Sequence[int] = (64,),
        dueling: bool = True,
    ):
        super().__init__()
        has_images = any(len(leaf.shape) == 3 for leaf in tree.flatten(observation_spec))
        self.torso = ObservationEncoder(observation_spec, () if has_images else hidden_sizes)
        width = self.torso.output_size
        self.core = None if lstm_size is None else RecurrentCore(width, lstm_size)
        self.head = QNetwork(
            dm_specs.Array((lstm_size or width,), "float32"), num_actions, head_sizes, dueling
        )

    def initial_state(self, batch_size: int) -> State:
        """The LSTM's state `[B, lstm_size]` at the start of an episode; `()` without an LSTM."""
        return () if self.core is None else self.core.initial_state(batch_size)

    def step(self, observation: Nest, state: State) -> tuple[torch.Tensor, State]:
        """One step of acting: `[B, ...]` to values `[B, A]` and the next state."""
        features = self.torso(observation)
        if self.core is not None:
            features, state = self.core.step(features, state)
        return self.head(features), state

    def unroll(
        self, observation: Nest, state: State, start_of_episode: torch.Tensor, burn_in: int
    ) -> torch.Tensor:
        """Values `[N, T - burn_in, A]` of the rows `[N, T, ...]` behind the burn-in.

        Args:
          observation: of the rows.
          state: before the first row, as the actor had it.
          start_of_episode: bool`[N, T]`; where True, the state restarts before that row.
          burn_in: rows that bring the state up to date, and pass on no gradients.
        """
        if self.core is not None and burn_in:
            with torch.no_grad():
                features = self.torso(tree.map_structure(lambda leaf: leaf[:, :burn_in], observation))
                _, state = self.core.unroll(features, state, start_of_episode[:, :burn_in])
        features = self.torso(tree.map_structure(lambda leaf: leaf[:, burn_in:], observation))
        if self.core is not None:
            features, _ = self.core.unroll(features, state, start_of_episode[:, burn_in:])
        return self.head(features)
