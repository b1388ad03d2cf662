"""The contract of batched environments, and the buffers and checks that all of them share."""

from __future__ import annotations

import abc
from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.types import FIRST as FIRST
from framework.types import LAST as LAST
from framework.types import MID as MID
from framework.types import Nest


class EnvironmentFault(RuntimeError):
    """Raised when an environment or an action breaks the contract. Names environment, env and field."""


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

    The observation of LAST is the one the episode ended in. Specs describe ONE env, without `[B]`.

    Returned arrays may be buffers that the environment reuses: a time step is intact until the second
    `step` after it, so copy arrays that you keep longer. One thread may use an environment at a time.
    """

    #: What errors call this environment.
    name: str = "environment"
    #: B.
    num_envs: int = 1
    #: Of one env; the four methods below read it, unless a subclass defines them itself.
    spec: specs.EnvironmentSpec
    #: Whether `step_envs` works.
    can_step_envs: bool = False
    #: Whether `end_episodes` works.
    can_end_episodes: bool = False

    @abc.abstractmethod
    def reset(self) -> dm_env.TimeStep:
        """Starts a new episode in every env, whatever state it is in."""

    @abc.abstractmethod
    def step(self, action: Nest) -> dm_env.TimeStep:
        """One step of every env; envs whose last step was LAST start a new episode and return FIRST.

        Raises:
          EnvironmentFault: an environment raised, or gave NaN, a wrong shape or dtype; or the action does
            not fit `action_spec()`. The environment must then be reset or closed.
        """

    def step_envs(self, action: Nest, active: np.ndarray) -> dm_env.TimeStep:
        """Like `step` where `active` (bool[B]) is set; the other envs keep their last values."""
        raise NotImplementedError(
            f"{self.name}: {type(self).__name__} cannot step some envs only, which action repeat needs. "
            "Make the environment with stepping='inline' or 'processes' and put ActionRepeat innermost."
        )

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
        """A picture uint8[height, width, 3] of one env; make the environment with `render_mode`."""
        raise NotImplementedError(
            f"{self.name}: {type(self).__name__} cannot render; make the environment with "
            "render_mode='rgb_array' and stepping='inline'."
        )


class Buffers:
    """Two sets of arrays for the time steps of B envs.

    The two slots are filled in turn, so that the previous time step is intact while the next one is written.

    Attributes:
      observations: per slot, per leaf of the observation spec, `[B, *shape]`.
      step_types, rewards, discounts: per slot; rewards and discounts per leaf of their specs.
    """

    SLOTS = 2

    def __init__(self, spec: specs.EnvironmentSpec, num_envs: int, allocate: Any = None):
        """`allocate(shape, dtype)` makes one array; `numpy.zeros` if not given."""
        allocate = allocate or np.zeros

        def columns(nest: Nest) -> list[np.ndarray]:
            return [allocate((num_envs, *leaf.shape), leaf.dtype) for leaf in tree.flatten(nest)]

        self.observations = [columns(spec.observations) for _ in range(self.SLOTS)]
        self.rewards = [columns(spec.rewards) for _ in range(self.SLOTS)]
        self.discounts = [columns(spec.discounts) for _ in range(self.SLOTS)]
        self.step_types = [allocate((num_envs,), np.dtype(np.int64)) for _ in range(self.SLOTS)]
        self.current = 0
        # The time steps are views of the buffers, built once and returned repeatedly.
        self._timesteps = [
            dm_env.TimeStep(
                step_type=self.step_types[slot],
                reward=nests.unflattener(spec.rewards)(self.rewards[slot]),
                discount=nests.unflattener(spec.discounts)(self.discounts[slot]),
                observation=nests.unflattener(spec.observations)(self.observations[slot]),
            )
            for slot in range(self.SLOTS)
        ]

    def flip(self) -> int:
        """Moves on to the other slot and returns it."""
        self.current = 1 - self.current
        return self.current

    def timestep(self) -> dm_env.TimeStep:
        """The current slot as a time step."""
        return self._timesteps[self.current]


class ActionChecker:
    """Converts an action to arrays `[B, *shape]` of the action spec's dtypes, or raises EnvironmentFault."""

    def __init__(self, name: str, spec: Nest, num_envs: int):
        self._name = name
        self._num_envs = num_envs
        self._spec = spec
        self._leaves = specs.leaves(spec)
        self._single = len(self._leaves) == 1 and self._leaves[0][0] == ()
        # A spec's properties are Python calls: read once, not at every step.
        self._expected = [((num_envs, *leaf.shape), leaf.dtype, leaf.dtype.kind) for _, leaf in self._leaves]
        self._bounds = [
            (leaf.minimum, leaf.maximum) if isinstance(leaf, specs.BoundedArray) else None
            for _, leaf in self._leaves
        ]

    def __call__(self, action: Nest) -> list[np.ndarray]:
        """One array per leaf of the spec, in the order of `tree.flatten`; possibly the caller's own."""
        if self._single:
            return [self._leaf(action, 0)]
        try:
            return [
                self._leaf(specs.pick(action, path), index) for index, (path, _) in enumerate(self._leaves)
            ]
        except (KeyError, IndexError, TypeError) as error:
            raise EnvironmentFault(
                f"{self._name}: the action's structure is {tree.map_structure(type, action)}, which lacks "
                f"a part of the action spec {self._spec}; the policy must return one array per leaf of it."
            ) from error

    def _leaf(self, value: Any, index: int) -> np.ndarray:
        array = np.asarray(value)
        expected, dtype, kind = self._expected[index]
        path = self._leaves[index][0]
        if array.shape != expected:
            raise self._fault(
                path, f"has shape {array.shape}, expected {expected}", "return one action per env"
            )
        if array.dtype != dtype:
            if kind in "iu" and array.dtype.kind not in "iub":
                raise self._fault(path, f"has dtype {array.dtype}, expected {dtype}", "return integers")
            array = array.astype(dtype)
        if kind == "f":
            if not all_finite(array):
                env = _first_bad_env(array)
                raise self._fault(
                    path,
                    f"of env {env} is {array[env]!r}, which is not finite",
                    "check the policy's parameters and losses for NaN",
                )
        elif (bounds := self._bounds[index]) is not None:
            minimum, maximum = bounds
            bad = (array < minimum) | (array > maximum)
            if np.count_nonzero(bad):
                env = int(np.nonzero(bad.reshape(self._num_envs, -1).any(axis=1))[0][0])
                raise self._fault(
                    path,
                    f"of env {env} is {array[env]!r}, outside {minimum} ... {maximum}",
                    "size the policy's output by action_spec()",
                )
        return array

    def _fault(self, path: specs.Path, what: str, fix: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._name}: {specs.path_name('action', path)} {what}; {fix}.")


def all_finite(array: np.ndarray) -> bool:
    """Whether a float array holds neither NaN nor infinity."""
    # On a batch of small observations count_nonzero() takes a fifth of the time of all().
    return np.count_nonzero(np.isfinite(array)) == array.size


def _first_bad_env(array: np.ndarray) -> int:
    finite = np.isfinite(array.reshape(array.shape[0], -1)).all(axis=1)
    return int(np.nonzero(~finite)[0][0])


def check_finite(name: str, field: str, path: specs.Path, array: np.ndarray, first_env: int = 0) -> None:
    """Raises if a float array `[B, ...]` holds NaN or infinity, naming the env."""
    if array.dtype.kind != "f" or all_finite(array):
        return
    env = _first_bad_env(array)
    what = "NaN" if np.isnan(array[env]).any() else "infinity"
    raise EnvironmentFault(
        f"{name}, env {first_env + env}: {specs.path_name(field, path)} holds {what}: {array[env]!r}; "
        "expected finite numbers. Find where the environment divides by zero or diverges, and end the "
        "episode there."
    )
