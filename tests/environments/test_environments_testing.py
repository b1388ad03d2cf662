"""Single environments of ours keep dm_env's contract, as dm_env's own tests check it."""

import unittest

import numpy as np
import pytest
from dm_env import test_utils

from framework import specs
from framework.environments import testing
from framework.environments.atari import AtariEnvironment
from framework.environments.minatar import MinAtarEnvironment

NESTED = testing.make_spec(
    {"a": specs.Array((2,), np.float64), "b": (specs.DiscreteArray(3),)},
    rewards={"x": specs.Array((2,), np.float64), "y": specs.Array((), np.float32)},
    discounts={"x": specs.BoundedArray((2,), np.float64, 0, 1)},
)
MADE = {
    "Fake": testing.FakeEnvironment,
    "FakeNested": lambda: testing.FakeEnvironment(NESTED, truncate=True),
    "Echo": testing.EchoEnvironment,
    "Sleep": lambda: testing.SleepEnvironment(0.0, episode_length=3),
    "Memory": testing.MemoryEnvironment,
    "Masked": lambda: testing.MaskedEnvironment(2),
    "Tuple": testing.TupleEnvironment,
    "MinAtar": lambda: pytest.importorskip("minatar") and MinAtarEnvironment("Breakout"),
    "Atari": lambda: pytest.importorskip("ale_py") and AtariEnvironment("Pong"),
}


class _Contract(test_utils.EnvironmentTestMixin):
    def make_object_under_test(self):
        return MADE[self.name]()

    def assertValidStep(self, step):
        super().assertValidStep(step)
        self.mask = specs.action_mask(step.observation)

    def make_action(self):
        """A legal one."""
        mask = getattr(self, "mask", None)
        return super().make_action() if mask is None else np.int64(np.argmax(mask))


for _name in MADE:
    globals()[_name] = type(_name, (_Contract, unittest.TestCase), {"name": _name, "__module__": __name__})
