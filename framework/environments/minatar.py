"""MinAtar: small versions of five Atari games (Young & Tian, 2019, "MinAtar: An Atari-Inspired Testbed")."""

from __future__ import annotations

import logging
from typing import Any

import dm_env
import numpy as np

from framework import specs
from framework.config_checks import whole_number

_NAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
#: MinAtar's name of each game, by a name such as `SpaceInvaders`.
GAMES = {name.title().replace("_", ""): name for name in _NAMES}

# One color per channel for render(), which enlarges each cell to this many pixels.
_CELL = 16
_COLORS = np.frombuffer(
    bytes.fromhex("e6503c fadc5a 788296 5aaae6 78d282 c882dc f0963c 5adcd2 dcdcdc a06e50"),
    np.uint8,
).reshape(-1, 3)


class MinAtarEnvironment(dm_env.Environment):
    """One game: float32[channels, 10, 10] observations of zeros and ones, points as reward."""

    def __init__(
        self,
        game: str,
        seed: int | None = None,
        sticky_actions: float = 0.1,
        ramping: bool = True,
        minimal_actions: bool = True,
        max_steps: int | None = 5_000,
    ):
        """Makes a game, by the name `Breakout` or `breakout`.

        Args:
          sticky_actions: probability that a step repeats the previous action.
          ramping: whether games get harder with time.
          minimal_actions: only the actions that the game uses, instead of all six.
          max_steps: steps after which an episode is truncated; None for no limit. Without one a ball of
            Breakout can bounce without end between walls and a paddle that does not move.
        """
        self._max_steps = None if max_steps is None else whole_number("max_steps", max_steps, 1)
        # It warns at import that it cannot draw without seaborn; render() below needs none.
        disabled = logging.root.manager.disable
        logging.disable(max(disabled, logging.WARNING))
        try:
            import minatar
        finally:
            logging.disable(disabled)
        self._game = minatar.Environment(
            GAMES.get(game, game), sticky_action_prob=sticky_actions, difficulty_ramping=ramping
        )
        self._game.seed(seed)
        self._actions = self._game.minimal_action_set() if minimal_actions else list(range(6))
        height, width, channels = self._game.state_shape()
        self._shape = (channels, height, width)
        self._steps = 0
        self._playing = False

    def observation_spec(self) -> specs.BoundedArray:
        return specs.BoundedArray(self._shape, np.float32, 0.0, 1.0, name="observation")

    def action_spec(self) -> specs.DiscreteArray:
        return specs.DiscreteArray(len(self._actions), dtype=np.int64, name="action")

    def _observe(self) -> np.ndarray:
        return self._game.state().transpose(2, 0, 1).astype(np.float32)

    def seed(self, seed: int) -> None:
        """Makes the next episode begin as the first one of a game with this seed."""
        self._game.seed(seed)
        self._game.last_action = 0  # Which sticks to the first step.

    def reset(self) -> dm_env.TimeStep:
        self._game.reset()
        self._playing = True
        self._steps = 0
        return dm_env.restart(self._observe())

    def step(self, action: Any) -> dm_env.TimeStep:
        if not self._playing:
            return self.reset()
        reward, over = self._game.act(self._actions[int(action)])
        if over:
            self._playing = False
            return dm_env.termination(float(reward), self._observe())
        self._steps += 1
        if self._steps == self._max_steps:
            self._playing = False
            return dm_env.truncation(float(reward), self._observe())
        return dm_env.transition(float(reward), self._observe())

    def render(self) -> np.ndarray:
        """uint8[160, 160, 3]; each channel in its own color."""
        state = self._game.state()
        picture = np.zeros((*state.shape[:2], 3), np.uint8)
        for channel in range(state.shape[2]):
            picture[state[:, :, channel] > 0] = _COLORS[channel % len(_COLORS)]
        return picture.repeat(_CELL, axis=0).repeat(_CELL, axis=1)
