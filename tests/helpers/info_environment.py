"""An environment whose `info` has numbers. Children of environments import this, which imports little."""

from __future__ import annotations

import gymnasium
import numpy as np

SPACES = {
    "box": gymnasium.spaces.Box(-1, 1, (2,), np.float32),
    "dict": gymnasium.spaces.Dict(
        {"a": gymnasium.spaces.Discrete(3, start=4), "z": gymnasium.spaces.Discrete(2)}
    ),
    "tuple": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3, start=4)]),
}


class InfoEnvironment(gymnasium.Env):
    """Three steps; `is_success` is a number of the reset's options, and `distance` counts down to 0."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, space="box", success=True):
        self.observation_space, self._success = SPACES[space], success

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.goal = 3, (options or {}).get("goal", True)
        return self.observation_space.sample(), {"distance": 3}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        info = {"distance": np.array([self.left])} | (
            {"is_success": self._success if self.goal else 0} if over else {}
        )
        return self.observation_space.sample(), 1.0, over, False, info
