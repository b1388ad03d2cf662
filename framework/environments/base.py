"""The contract of batched environments."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import dm_env
import numpy as np
import tree

from framework import specs
from framework.types import FIRST as FIRST
from framework.types import LAST as LAST
from framework.types import MID as MID
from framework.types import Nest
from launch.errors import message_of


class EnvironmentFault(RuntimeError):
    """An environment or an action breaks the contract. The message names environment, env and field."""


class UnexpectedReturn(ValueError):
    """A call returned what breaks the contract: `what` begins with `returned`; `fix` says what to do."""

    def __init__(self, what: str, fix: str):
        super().__init__(what, fix)

    def __str__(self) -> str:
        return ". ".join(self.args)


def describe(call: str, error: Exception) -> str:
    """The sentence that tells of an error in a call of an environment."""
    if isinstance(error, UnexpectedReturn):
        return f"{call} {error}."
    return f"{call} raised {type(error).__name__}: {message_of(error)}."


class BatchedEnvironment(dm_env.Environment):
    """B environments ("envs") behind dm_env's interface, every array with a leading `[B]`.

    ```python
    timestep = environment.reset()                   # all envs FIRST
    while True:
        timestep = environment.step(action)          # action: nest of [B, ...]
        timestep.step_type                           # int64[B]: 0 FIRST, 1 MID, 2 LAST
        timestep.reward, timestep.discount           # float32[B]; on FIRST 0 and 1, never None
        timestep.observation                         # nest of [B, ...]
    ```

    How one env's episode ends and the next begins (an env's action is ignored at `*`):

    ```text
    step_type   FIRST  MID   MID   LAST  FIRST*  MID
    reward        0     r     r     r      0      r
    discount      1     1     1     d      1      1       d = 0: terminated; d > 0: truncated
    ```

    The observation of LAST is the one the episode ended in. Specs describe ONE env, without `[B]`. With
    several agents in an env (`specs.agents(spec)`), time steps are `framework.types.MultiAgentTimeStep`s.

    Returned arrays may be buffers that the environment reuses: a time step is intact until the second
    `step` after it, so copy arrays that you keep longer. One thread may use an environment at a time.
    """

    #: The name of this environment in error messages.
    name: str = "environment"
    #: B.
    num_envs: int = 1
    #: The spec of one env. The four `*_spec` methods return its fields, unless a subclass overrides them.
    spec: specs.EnvironmentSpec
    #: The torch device of its time steps, which are tensors; None: they are numpy arrays.
    device: Any = None
    #: Whether `environments.make` gave it its seed, or None for no seed.
    takes_seed: bool = False

    @property
    def cut(self) -> np.ndarray | None:
        """bool[B]: envs that the last `reset` could not reset: their FIRST is in mid-episode. None: none."""
        return None

    @property
    def infos(self) -> Mapping[str, np.ndarray]:
        """Numbers of the envs' last steps beside their observations, `[B]` by name, NaN where there is none.

        Those that `info_metrics` names become metrics of the episodes that end with these steps.
        """
        return {}

    @property
    def exact_rewards(self) -> list[np.ndarray] | None:
        """The rewards of the last step in float64, `[B, ...]` per leaf; None if they are the time step's."""
        return None

    @abc.abstractmethod
    def reset(self) -> dm_env.TimeStep:
        """Starts a new episode in every env, even in the middle of an episode."""

    @abc.abstractmethod
    def step(self, action: Nest) -> dm_env.TimeStep:
        """One step of every env; envs whose last step was LAST start a new episode and return FIRST.

        Raises:
          EnvironmentFault: The environment raised an error or returned NaN, a wrong shape or a wrong dtype;
            or the action does not fit `action_spec()`. Reset or close the environment before the next step.
        """

    def write_to(self, rows: Any) -> None:
        """Makes the environment write each later time step into row `rows.at`; with None, into new arrays.

        `rows` are `TimeStepRows`. An environment that can do so sets `rows.verify`, which then checks the
        values. The others ignore the call. A time step is intact until its row is written again.
        """
        return

    def repeat_actions(self, num_repeats: int) -> None:
        """Makes each later `step` give its actions several times; see `ActionRepeat`."""
        raise NotImplementedError(
            f"{self.name}: {type(self).__name__} cannot repeat actions. Make the environment with "
            "stepping='inline' or 'processes' and put ActionRepeat innermost."
        )

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        """Makes the next episodes of `envs` (bool[B]) begin as the first ones of envs made with `seeds`.

        Args:
          seeds: int64[B], of 0 to 2**32 - 1; other envs' do not matter.
          envs: bool[B].
        """
        raise NotImplementedError(
            f"{self.name}: {type(self).__name__} cannot begin an episode with a given seed."
        )

    def start_over(self) -> None:
        """Makes the next `reset` begin with the first of the episodes that `SeededEpisodes` numbers."""

    def end_episodes(self, envs: np.ndarray) -> None:
        """Makes the next `step` start a new episode in `envs` (bool[B]), as after LAST."""
        raise NotImplementedError(
            f"{self.name}: {type(self).__name__} cannot end the episodes of some envs, which a step limit "
            "needs. Make the environment with stepping='inline' or 'processes'; gymnasium's environments "
            "take options={'max_episode_steps': n} as well."
        )

    def observation_spec(self) -> Nest:
        return self.spec.observations

    def action_spec(self) -> Nest:
        return self.spec.actions

    def reward_spec(self) -> Nest:
        return self.spec.rewards

    def discount_spec(self) -> Nest:
        return self.spec.discounts

    def render(self, env: int = 0) -> np.ndarray:
        """An image uint8[height, width, 3] of one env; make the environment with `render_mode`."""
        raise NotImplementedError(
            f"{self.name}: {type(self).__name__} cannot render; make the environment with "
            "render_mode='rgb_array' and stepping='inline'."
        )


def unrounded(environment: BatchedEnvironment, timestep: dm_env.TimeStep) -> list[np.ndarray]:
    """The rewards of the last time step of `environment`, `[B, ...]` per leaf, before they became float32."""
    rewards, exact = tree.flatten(timestep.reward), environment.exact_rewards
    if exact is None or [array.shape for array in exact] != [array.shape for array in rewards]:
        return rewards
    # A wrapper may have put other rewards in their place.
    same = [e.astype(r.dtype) == r for e, r in zip(exact, rewards, strict=True)]
    if all(np.count_nonzero(each) == each.size for each in same):
        return exact
    return [np.where(s, e, r) for s, e, r in zip(same, exact, rewards, strict=True)]
