"""The actor of all agents: a policy, an adder and a variable client."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from framework import core
from framework.actors.recurrent_state import restart_envs
from framework.types import FIRST, Nest


class PolicyActor(core.Actor, core.Saveable):
    """Acts for `num_envs` envs with `policy`, writes experience to `adder`, and updates parameters.

    Each env's recurrent state restarts when its episode does. The extras that the policy returns with an
    action are stored in the row of that action. The calls have the order that `framework.core` shows:

    ```python
    actor = PolicyActor(policy, adder, VariableClient(learner_client, networks), num_envs=4, seed=1)
    actor.observe_first(timestep)
    action = actor.select_action(timestep.observation)
    actor.observe(action, environment.step(action))
    actor.update()
    ```

    Args:
      policy: chooses actions; a pure step.
      adder: takes the experience. None discards it, as in an evaluator. The attribute may be replaced
        before `observe_first`.
      variable_client: updates the networks of the policy. None does not update them.
      num_envs: number of envs of the environment, B.
      seed: seeds the policy's random choices. None does not seed them.
    """

    def __init__(
        self,
        policy: core.Policy,
        adder: Any = None,
        variable_client: Any = None,
        num_envs: int = 1,
        seed: int | None = None,
    ):
        if num_envs < 1:
            raise ValueError(f"num_envs: got {num_envs}, expected at least 1.")
        self.policy = policy
        self.num_envs = num_envs
        self.adder = adder
        self._variable_client = variable_client
        self._state: Nest = None
        self._has_memory = False
        self._extras: Nest = ()
        if seed is not None:
            policy.seed(seed)

    def ready(self) -> bool:
        """Whether the next `observe` can run without waiting for replay."""
        return self.adder is None or self.adder.ready()

    def observe_first(self, timestep: Any) -> None:
        self._state = self.policy.initial_state(self.num_envs)
        self._has_memory = bool(tree.flatten(self._state))
        self._extras = ()
        if self.adder is not None:
            self.adder.add_first(timestep)

    def select_action(self, observation: Nest) -> Nest:
        if self._state is None:
            raise RuntimeError("select_action() came before observe_first(); give it the first time step.")
        action, self._extras, self._state = self.policy.step(observation, self._state)
        return action

    def observe(self, action: Nest, next_timestep: Any) -> None:
        if self.adder is not None:
            self.adder.add(action, next_timestep, self._extras)
        if self._state is None:
            raise RuntimeError("observe() came before observe_first(); give it the first time step.")
        if self._has_memory:
            begins = np.flatnonzero(next_timestep.step_type == FIRST)
            if len(begins):
                initial = self.policy.initial_state(self.num_envs)
                self._state = restart_envs(self._state, initial, begins)

    def update(self, wait: bool = False) -> None:
        if self._variable_client is not None:
            self._variable_client.update(wait)

    def save(self) -> dict[str, Any]:
        """The policy's random state. Open episodes are not saved: a resumed actor starts new ones."""
        return {"policy": self.policy.save()}

    def restore(self, state: dict[str, Any]) -> None:
        self.policy.restore(state["policy"])
        self._state = None
        self._extras = ()
