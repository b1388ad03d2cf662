"""One of our actors as an `acme.core.Actor`, so that an Acme `EnvironmentLoop` can drive it.

```python
actor = PolicyActor(agent.make_policy(networks), adder=adder, num_envs=1)
loop = acme.EnvironmentLoop(dm_environment, AcmeActor(actor))
loop.run(num_episodes=10)
```

Acme drives one environment, without a batch dimension; our actors act for B envs. So everything gets a
leading axis of one on the way in, and loses it on the way out. Nothing of Acme is imported: its loop asks
only for these four methods.
"""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np
import tree

from framework import core
from framework.types import Nest


class AcmeActor:
    """See the module.

    Args:
      actor: for one env.
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
        """What `action` led to."""
        self._actor.observe(_batched(action), _batched_timestep(next_timestep))

    def update(self, wait: bool = False) -> None:
        """Pulls newer parameters if there are any."""
        self._actor.update(wait)


def _batched(nest: Nest) -> Nest:
    return tree.map_structure(lambda leaf: np.asarray(leaf)[None], nest)


def _batched_timestep(timestep: dm_env.TimeStep) -> dm_env.TimeStep:
    """`[1, ...]` everywhere; float32 as our environments have it, 0 and 1 where Acme has None."""
    return dm_env.TimeStep(
        step_type=np.array([int(timestep.step_type)]),
        reward=_float(timestep.reward, 0.0),
        discount=_float(timestep.discount, 1.0),
        observation=_batched(timestep.observation),
    )


def _float(value: Any, missing: float) -> np.ndarray:
    return np.array([missing if value is None else value], np.float32)
