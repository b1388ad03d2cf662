"""An adapter from an actor to `acme.core.Actor`, so that an Acme `EnvironmentLoop` can drive it.

```python
actor = PolicyActor(agent.make_policy(networks), adder=adder, num_envs=1)
loop = acme.EnvironmentLoop(dm_environment, AcmeActor(actor))
loop.run(num_episodes=10)
```

Acme drives one environment without a batch dimension, while actors here act for B envs. The adapter adds a
leading axis of size 1 to inputs and removes it from actions. Acme is not imported: its loop needs only these
four methods.
"""

from __future__ import annotations

import dm_env
import numpy as np
import tree

from framework import core
from framework.types import Nest


class AcmeActor:
    """Presents an actor for one env as an `acme.core.Actor`; see the module.

    Args:
      actor: an actor with `num_envs=1`.
    """

    def __init__(self, actor: core.Actor):
        self._actor = actor

    def select_action(self, observation: Nest) -> Nest:
        """The action for one observation without a batch dimension."""
        action = self._actor.select_action(_batched(observation))
        return tree.map_structure(lambda leaf: np.asarray(leaf)[0], action)

    def observe_first(self, timestep: dm_env.TimeStep) -> None:
        """Acme's first time step: its reward and discount are None."""
        self._actor.observe_first(_batched_timestep(timestep))

    def observe(self, action: Nest, next_timestep: dm_env.TimeStep) -> None:
        """Takes the time step that follows `action`."""
        self._actor.observe(_batched(action), _batched_timestep(next_timestep))

    def update(self, wait: bool = False) -> None:
        """Pulls newer parameters if there are any."""
        self._actor.update(wait)


def _batched(nest: Nest) -> Nest:
    return tree.map_structure(lambda leaf: np.asarray(leaf)[None], nest)


def _batched_timestep(timestep: dm_env.TimeStep) -> dm_env.TimeStep:
    """A time step of `[1, ...]` arrays; a reward of None becomes 0, a discount of None becomes 1."""
    return dm_env.TimeStep(
        step_type=np.array([int(timestep.step_type)]),
        reward=_float(timestep.reward, 0.0),
        discount=_float(timestep.discount, 1.0),
        observation=_batched(timestep.observation),
    )


def _float(value: Nest, missing: float) -> Nest:
    return tree.map_structure(lambda leaf: np.array([leaf], np.float32), missing if value is None else value)
