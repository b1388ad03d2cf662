"""An environment of two agents in Acme's form, for tests to complete."""

from __future__ import annotations

import dm_env
import numpy as np

from framework import specs


class TwoAgents(dm_env.Environment):
    """Has the specs. A subclass says what one agent observes and does, and has `reset` and `step`."""

    observation = specs.Array((1,), np.float32)
    action = specs.DiscreteArray(2, dtype=np.int64)

    def of_both(self, value):
        return dict.fromkeys(("agent_0", "agent_1"), value)

    def observation_spec(self):
        return self.of_both(self.observation)

    def action_spec(self):
        return self.of_both(self.action)

    def reward_spec(self):
        return self.of_both(specs.Array((), np.float32))

    def discount_spec(self):
        return self.of_both(specs.BoundedArray((), np.float32, 0.0, 1.0))
