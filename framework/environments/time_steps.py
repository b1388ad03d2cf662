"""The border to the code of environments: checks of actions and time steps of B envs, at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework import specs
from framework.environments.base import FIRST, LAST, MID, EnvironmentFault
from framework.environments.fields import STEP_TYPE, FieldChecker
from framework.environments.tensor import arrays, copied
from framework.types import MultiAgentTimeStep, Nest


class TimeStepChecker:
    """Checks the actions that go to B envs, and the time steps that they return.

    Attributes:
      action: the checker of the actions.
      fields: the checkers of a time step's fields, by name.
    """

    def __init__(
        self,
        name: str,
        spec: specs.EnvironmentSpec,
        num_envs: int,
        *,
        observation_starts: Sequence[int] = (),
        action_starts: Sequence[int] = (),
        first_env: int = 0,
        make: Callable[..., FieldChecker] = FieldChecker,
    ):
        """Makes the checkers of all fields; `make` makes that of one. See `FieldChecker`."""
        self._name, self._first_env, self._envs = name, first_env, range(num_envs)
        self.action = make(name, "action", spec.actions, num_envs, action_starts)
        nests = {
            "step_type": STEP_TYPE,
            "reward": spec.rewards,
            "discount": spec.discounts,
            "observation": spec.observations,
        }
        if agents := specs.agents(spec):
            nests["agents"] = dict.fromkeys(agents, STEP_TYPE)
        starts = {"observation": observation_starts}
        self.fields = {
            field: make(name, field, of, num_envs, starts.get(field, ()), first_env)
            for field, of in nests.items()
        }
        self._gathered = list(self.fields.values())[1:]
        self._time_step: Any = MultiAgentTimeStep if agents else dm_env.TimeStep
        # Several agents are left out: one that is not in the episode has a mask of zeros.
        self._has_mask, self._has_agents = specs.has_action_mask(spec), bool(agents)
        self._mask_starts = np.cumsum([0, *specs.choices(spec.actions)])[:-1]

    def __call__(self, timestep: Any) -> Any:
        """A copy of a time step of B envs, checked."""
        fields = [
            check.build(copied(check(getattr(timestep, field)))) for field, check in self.fields.items()
        ]
        timestep = self._time_step(*fields)
        if self._has_mask or self._has_agents:
            self._check_together(timestep)
        return timestep

    def gather(self, step_types: Sequence[int], *values: Sequence[Nest]) -> Any:
        """The time step of B envs, from the values of its fields, one for each env."""
        fields: list[Nest] = [np.array(step_types, np.int64)]
        for check, of_envs in zip(self._gathered, values):  # noqa: B905  (one agent has no step types)
            fields.append(check.build(check.gather(of_envs, self._envs)))
        timestep = self._time_step(*fields)
        if self._has_mask or self._has_agents:
            self._check_together(timestep)
        return timestep

    def _check_together(self, timestep: Any) -> None:
        """Checks what several fields say together."""
        if self._has_mask:
            step_type, mask = arrays((timestep.step_type, specs.action_mask(timestep.observation)))
            legal = allowed(mask)
            stuck = ~np.logical_or.reduceat(legal, self._mask_starts, axis=1).all(1) & (step_type != LAST)
            if np.count_nonzero(stuck):
                env = int(np.flatnonzero(stuck)[0])
                raise EnvironmentFault(
                    f"{self._name}, env {self._first_env + env}: {specs.ACTION_MASK} is "
                    f"{legal[env].astype(int)}, expected a legal action for each choice. End the episode "
                    "where nothing can be done."
                )
        if self._has_agents:
            kind = timestep.step_type
            for name, kinds in timestep.agents.items():
                # The agents begin with the environment, and none goes on beyond its end.
                wrong = ((kind == FIRST) & (kinds != FIRST)) | ((kind == LAST) & (kinds == MID))
                if np.count_nonzero(wrong):
                    env = int(np.flatnonzero(wrong)[0])
                    raise EnvironmentFault(
                        f"{self._name}, env {self._first_env + env}: agents: {name} has step type "
                        f"{kinds[env]} where the environment's is {kind[env]}, expected FIRST with FIRST, "
                        "and FIRST or LAST with LAST."
                    )


def allowed(mask: Nest) -> np.ndarray:
    """bool`[B, A]` of a mask, which may be a nest."""
    return np.concatenate(tree.flatten(mask), axis=-1) > 0
