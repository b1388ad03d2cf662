"""An environment that breaks, in one of eight manners."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np

from framework.environments.testing import EchoEnvironment


class FaultyEnvironment(EchoEnvironment):
    """Breaks at transition `at` (counted from 1, over episodes) in the manner of `fault`.

    `exit` ends the process, `hang` never returns: both are for environments in processes.
    """

    def __init__(self, fault: str, at: int = 3, episode_length: int = 5):
        super().__init__(episode_length=episode_length)
        self._fault, self._countdown = fault, at

    def step(self, action):
        timestep = super().step(action)
        self._countdown -= not timestep.first()
        if self._countdown != 0:
            return timestep
        if self._fault == "raise":
            raise RuntimeError("the simulator exploded")
        if self._fault == "exit":
            os._exit(7)
        if self._fault == "sys.exit":
            sys.exit(0)
        if self._fault == "hang":
            threading.Event().wait()
        replaced = {
            "nan_observation": {"observation": np.array([np.nan], np.float32)},
            "nan_reward": {"reward": float("nan")},
            "shape": {"observation": np.zeros(2, np.float32)},
            "dtype": {"observation": np.array(["a"])},
        }
        return timestep._replace(**replaced[self._fault])
