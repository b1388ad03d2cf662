"""Recurrent cores that act step by step and learn from sequences that hold the ends of episodes."""

from __future__ import annotations

import torch
from torch import nn

State = tuple[torch.Tensor, ...]


class RecurrentCore(nn.Module):
    """An LSTM (Hochreiter and Schmidhuber, 1997) or a GRU (Cho et al., 2014) of one layer.

    ```python
    state = core.initial_state(envs)
    features, state = core.step(inputs, state)                      # acting, [B, ...]
    features, _ = core.unroll(inputs, state, start_of_episode)      # learning, [N, T, ...]
    ```

    The LSTM's forget gates begin with a bias of 1 (Jozefowicz et al., 2015), which torch's do not: at 0 half
    of the memory is lost at each step, and after ten there is next to nothing to learn from.

    A state is a tuple of `[B, hidden_size]`: hidden and cell of an LSTM, hidden of a GRU; zeros at the
    start of an episode. `step` and `unroll` use the same cell: for one time step a cell is about ten times as
    fast as `nn.LSTM`, and in a sequence the state must restart wherever an episode does.

    Args:
      input_size: width of the inputs.
      hidden_size: width of the state and of the output, `output_size`.
      kind: "lstm" or "gru".
    """

    def __init__(self, input_size: int, hidden_size: int, kind: str = "lstm"):
        super().__init__()
        cells: dict[str, type[nn.LSTMCell] | type[nn.GRUCell]] = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}
        if kind not in cells:
            raise ValueError(f"kind: got {kind!r}, expected one of {sorted(cells)}.")
        self.cell = cells[kind](input_size, hidden_size)
        if kind == "lstm":
            with torch.no_grad():
                self.cell.bias_hh[hidden_size : 2 * hidden_size] += 1.0
        self._parts = 2 if kind == "lstm" else 1
        self.output_size = hidden_size

    def initial_state(self, batch_size: int) -> State:
        """Zeros for `batch_size` envs, on the device of the parameters."""
        weight = self.cell.weight_hh
        return tuple(weight.new_zeros(batch_size, self.output_size) for _ in range(self._parts))

    def step(self, inputs: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """`[B, input_size]` and a state to `[B, hidden_size]` and the next state."""
        if self._parts == 1:
            hidden = self.cell(inputs, state[0])
            return hidden, (hidden,)
        hidden, memory = self.cell(inputs, state)
        return hidden, (hidden, memory)

    def unroll(
        self, inputs: torch.Tensor, state: State, start_of_episode: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, State]:
        """`[N, T, input_size]` to `[N, T, hidden_size]` and the state behind the last row.

        Args:
          state: `[N, ...]` before the first row, as it was when its action was chosen.
          start_of_episode: `[N, T]`; where it is 1 or True, the state restarts before that row.
        """
        if start_of_episode is not None and start_of_episode.shape != inputs.shape[:2]:
            raise ValueError(
                f"start_of_episode: got shape {tuple(start_of_episode.shape)}, expected "
                f"{tuple(inputs.shape[:2])}, the first two axes of the inputs."
            )
        outputs = []
        for t, row in enumerate(inputs.unbind(1)):
            if start_of_episode is not None:
                restarts = (start_of_episode[:, t] != 0).unsqueeze(-1)
                state = tuple(part.masked_fill(restarts, 0.0) for part in state)
            output, state = self.step(row, state)
            outputs.append(output)
        return torch.stack(outputs, 1), state
