"""Wrappers: batched environments around batched environments, vectorized over the envs.

```python
environment = environments.make(
    "gymnasium:HalfCheetah-v5",
    num_envs=8,
    wrappers=[wrappers.RescaleAction, functools.partial(wrappers.FrameStack, num_frames=4)],
)
```

The first wrapper of a list is the innermost. The next one receives its time steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import dm_env
import numpy as np
import tree

from framework import specs
from framework.config_checks import whole_number
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment, EnvironmentFault
from framework.environments.rows import TimeStepRows
from framework.foreign import copies, is_foreign
from framework.types import MultiAgentTimeStep, Nest

T = TypeVar("T")


class EnvironmentWrapper(BatchedEnvironment):
    """Forwards everything to the wrapped environment. Subclasses change some of it.

    A subclass changes specs by `self.spec = self.spec._replace(...)` in its constructor.
    """

    def __init__(self, environment: BatchedEnvironment):
        self._environment = environment
        self.name = environment.name
        self.num_envs = environment.num_envs
        self.takes_seed = environment.takes_seed
        self.spec = specs.make_environment_spec(environment)

    @property
    def wrapped(self) -> BatchedEnvironment:
        """The environment inside this one."""
        return self._environment

    @property
    def cut(self) -> np.ndarray | None:
        return self._environment.cut

    @property
    def infos(self) -> Mapping[str, np.ndarray]:
        return self._environment.infos

    @property
    def exact_rewards(self) -> list[np.ndarray] | None:
        return self._environment.exact_rewards

    def reset(self) -> dm_env.TimeStep:
        return self._environment.reset()

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._environment.step(action)

    def write_to(self, rows: TimeStepRows | None) -> None:
        # A wrapper of another package gets arrays that are its own.
        if rows is None or not is_foreign(self):
            self._environment.write_to(rows)

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._environment.seed_episodes(seeds, envs)

    def start_over(self) -> None:
        self._environment.start_over()

    def end_episodes(self, envs: np.ndarray) -> None:
        self._environment.end_episodes(envs)

    def render(self, env: int = 0) -> np.ndarray:
        return self._environment.render(env)

    def close(self) -> None:
        self._environment.close()


def find_inside(environment: BatchedEnvironment, kind: type[T]) -> T | None:
    """Of an environment and those inside its wrappers, the outermost one of a class; None without one."""
    while isinstance(environment, EnvironmentWrapper) and not isinstance(environment, kind):
        environment = environment.wrapped
    return environment if isinstance(environment, kind) else None


class ActionRepeat(EnvironmentWrapper):
    """Gives the same action `num_repeats` times: rewards summed, discounts multiplied.

    An env stops early if its episode ends or if its action mask no longer allows the action. With rewards r_i
    and discounts d_i of the inner steps: reward = Σ_i (Π_{j<i} d_j) r_i and discount = Π_i d_i.
    """

    def __init__(self, environment: BatchedEnvironment, num_repeats: int):
        super().__init__(environment)
        num_repeats = whole_number("num_repeats", num_repeats, 1)
        for field, spec in (("reward", environment.reward_spec()), ("discount", environment.discount_spec())):
            if tree.is_nested(spec) or spec.shape != ():
                raise ValueError(
                    f"{self.name}: {field}: got the spec {spec}, expected a scalar for ActionRepeat."
                )
        environment.repeat_actions(num_repeats)
        if num_repeats > 1:  # stacks of frames move by more than one frame a step here
            self.spec = self.spec._replace(observations=specs.unstacked(self.spec.observations))


class StepLimit(EnvironmentWrapper):
    """Truncates episodes after `limit` steps: LAST with the environment's own discount."""

    def __init__(self, environment: BatchedEnvironment, limit: int):
        super().__init__(environment)
        self._limit = whole_number("limit", limit, 1)
        environment.end_episodes(np.zeros(self.num_envs, bool))  # raises if the environment cannot
        self._lengths = np.zeros(environment.num_envs, np.int64)

    def reset(self) -> dm_env.TimeStep:
        self._lengths[:] = 0
        return self._environment.reset()

    def step(self, action: Nest) -> dm_env.TimeStep:
        timestep = self._environment.step(action)
        self._lengths += 1
        self._lengths[timestep.step_type == FIRST] = 0
        cut = (self._lengths >= self._limit) & (timestep.step_type == MID)
        if not cut.any():
            return timestep
        self._environment.end_episodes(cut)
        ended = timestep._replace(step_type=np.where(cut, LAST, timestep.step_type))
        if isinstance(ended, MultiAgentTimeStep):  # The episodes of the agents that play end, too.
            ended = ended._replace(
                agents={
                    name: np.where(cut & (kind == MID), LAST, kind) for name, kind in ended.agents.items()
                }
            )
        return ended


class ClipAction(EnvironmentWrapper):
    """Clips continuous actions to the bounds of the action spec."""

    def step(self, action: Nest) -> dm_env.TimeStep:
        def clip(spec: specs.Array, value: Any) -> Any:
            if spec.dtype.kind != "f" or not isinstance(spec, specs.BoundedArray):
                return value
            return np.clip(value, spec.minimum, spec.maximum)

        return self._environment.step(tree.map_structure(clip, self.spec.actions, action))


class RescaleAction(EnvironmentWrapper):
    """Maps continuous actions in [-1, 1] linearly to the environment's bounds.

    Args:
      environment: the environment to wrap.
      clip: whether actions outside [-1, 1] are clipped first.
    """

    def __init__(self, environment: BatchedEnvironment, clip: bool = False):
        super().__init__(environment)
        self._inner = environment.action_spec()
        self._clip = clip
        for path, leaf in specs.leaves(self._inner):
            if leaf.dtype.kind == "f" and not specs.is_bounded(leaf):
                raise ValueError(
                    f"{self.name}: {specs.path_name('action', path)} cannot be rescaled, its bounds are not "
                    f"finite: {leaf}; give the environment's action space finite bounds."
                )
        self.spec = self.spec._replace(actions=tree.map_structure(_unit_spec, self._inner))

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._environment.step(tree.map_structure(self._rescale, self._inner, action))

    def _rescale(self, spec: specs.Array, value: Any) -> Any:
        if spec.dtype.kind != "f":
            return value
        assert isinstance(spec, specs.BoundedArray)
        value = np.asarray(value, spec.dtype)
        if self._clip:
            value = np.clip(value, -1.0, 1.0)
        # Exact at both ends, and without an overflow where the range is larger than any number of the dtype.
        half = 0.5 * (value + 1.0)
        scaled = spec.minimum * (1.0 - half) + spec.maximum * half
        inside = np.abs(value) <= 1.0  # In between, rounding could leave the bounds.
        return np.where(inside, np.clip(scaled, spec.minimum, spec.maximum), scaled)


def _unit_spec(spec: specs.Array) -> specs.Array:
    return spec if spec.dtype.kind != "f" else spec.replace(minimum=-1.0, maximum=1.0)


class _ObservationWrapper(EnvironmentWrapper):
    """Changes each observation by `_transform(timestep)`."""

    def write_to(self, rows: TimeStepRows | None) -> None:
        return  # The observations are new arrays.

    def reset(self) -> dm_env.TimeStep:
        timestep = self._environment.reset()
        return timestep._replace(observation=self._transform(timestep))

    def step(self, action: Nest) -> dm_env.TimeStep:
        timestep = self._environment.step(action)
        return timestep._replace(observation=self._transform(timestep))

    def _transform(self, timestep: dm_env.TimeStep) -> Nest:
        raise NotImplementedError

    def _finite(self, leaf: np.ndarray) -> np.ndarray:
        """The leaf, if this wrapper has made no infinity of its numbers."""
        if np.count_nonzero(np.isfinite(leaf)) != leaf.size:
            raise EnvironmentFault(
                f"{self.name}: {type(self).__name__}: got an observation that is beyond {leaf.dtype}, "
                "expected smaller numbers. Scale it down in the environment."
            )
        return leaf


class FrameStack(_ObservationWrapper):
    """The last `num_frames` observations along a new first axis, oldest first; zeros before a FIRST.

    An `action_mask` stays the last observation's.
    """

    def __init__(self, environment: BatchedEnvironment, num_frames: int):
        super().__init__(environment)
        num_frames = whole_number("num_frames", num_frames, 1)
        inner = self.spec.observations
        stacked = tree.map_structure_with_path(
            lambda path, leaf: leaf if specs.ACTION_MASK in path else _stacked_spec(leaf, num_frames), inner
        )
        self.spec = self.spec._replace(observations=stacked)
        self._stacks = specs.zeros(stacked, (self.num_envs,))

    def _transform(self, timestep: dm_env.TimeStep) -> Nest:
        # Each agent has episodes of its own.
        kinds = timestep.agents if isinstance(timestep, MultiAgentTimeStep) else timestep.step_type

        def push(kind: np.ndarray, stacks: Nest, frames: Nest) -> Nest:
            first = kind == FIRST

            def push_leaf(old: np.ndarray, frame: np.ndarray) -> np.ndarray:
                if old.shape == frame.shape:  # A mask.
                    return frame
                new = np.empty_like(old)  # the stacks of the time step before stay intact
                new[:, :-1] = old[:, 1:]
                new[first] = 0
                new[:, -1] = frame
                return new

            return tree.map_structure(push_leaf, stacks, frames)

        self._stacks = tree.map_structure_up_to(kinds, push, kinds, self._stacks, timestep.observation)
        return copies(self._stacks)  # The caller may change what it gets.


def _stacked_spec(spec: specs.Array, num_frames: int) -> specs.Array:
    shape = (num_frames, *spec.shape)
    if isinstance(spec, specs.BoundedArray):
        # Zeros stand before an episode's start, whatever the bounds are.
        low, high = np.minimum(spec.minimum, 0), np.maximum(spec.maximum, 0)
        return specs.StackedBoundedArray(
            shape, spec.dtype, np.broadcast_to(low, shape), np.broadcast_to(high, shape), name=spec.name
        )
    return specs.StackedArray(shape, spec.dtype, name=spec.name)


class ObservationActionReward(EnvironmentWrapper):
    """Observations become dicts of `observation`, the previous `action`, and its `reward`.

    At the first step of an episode, action and reward are zeros. The policy sees its last action and reward,
    and replay holds the same inputs.
    """

    def __init__(
        self, environment: BatchedEnvironment, reward_clip: float | None = None, action: bool = True
    ):
        """Adds the two.

        Args:
          environment: the environment.
          reward_clip: the reward is clipped to +- this, in the observation only; None keeps it.
          action: False leaves the action out.
        """
        super().__init__(environment)
        if reward_clip is not None and not reward_clip > 0:
            raise ValueError(f"reward_clip: got {reward_clip}, expected more than 0, or None.")
        self._clip = reward_clip
        self._no_action = specs.zeros(self.spec.actions, (self.num_envs,))
        self._leaves_out_action = not action
        seen = self._seen(self.spec.observations, self.spec.actions, self.spec.rewards)
        self.spec = self.spec._replace(observations=seen)

    def write_to(self, rows: TimeStepRows | None) -> None:
        return  # The observations are nests of others.

    def reset(self) -> dm_env.TimeStep:
        return self._observe(copies(self._no_action), self._environment.reset())

    def step(self, action: Nest) -> dm_env.TimeStep:
        timestep = self._environment.step(action)
        first = timestep.step_type == FIRST

        def taken(leaf: Any, none: np.ndarray) -> np.ndarray:
            copied = np.array(leaf, none.dtype)
            if np.count_nonzero(first):
                copied[first] = 0
            return copied

        return self._observe(tree.map_structure(taken, action, self._no_action), timestep)

    def _observe(self, action: Nest, timestep: dm_env.TimeStep) -> dm_env.TimeStep:
        reward = timestep.reward
        if self._clip is not None:
            reward = tree.map_structure(lambda leaf: leaf.clip(-self._clip, self._clip), reward)
        return timestep._replace(observation=self._seen(timestep.observation, action, reward))

    def _seen(self, observation: Nest, action: Nest, reward: Nest) -> dict[str, Nest]:
        seen = {"observation": observation, "action": action, "reward": reward}
        if self._leaves_out_action:
            del seen["action"]
        return seen


class ScaleObservation(_ObservationWrapper):
    """Floating-point observations times `scale`, for agents that do not normalize them."""

    def __init__(self, environment: BatchedEnvironment, scale: float):
        super().__init__(environment)
        if not scale > 0:
            raise ValueError(f"scale: got {scale}, expected more than 0.")
        self._scale = scale
        observations = tree.map_structure(lambda leaf: _scaled_spec(leaf, scale), self.spec.observations)
        self.spec = self.spec._replace(observations=observations)

    def _transform(self, timestep: dm_env.TimeStep) -> Nest:
        return tree.map_structure(
            lambda leaf: (
                self._finite(leaf * leaf.dtype.type(self._scale)) if leaf.dtype.kind == "f" else leaf
            ),
            timestep.observation,
        )


def _scaled_spec(spec: specs.Array, scale: float) -> specs.Array:
    if spec.dtype.kind != "f" or not isinstance(spec, specs.BoundedArray):
        return spec
    with np.errstate(over="ignore"):  # bounds near the largest number of the dtype become infinite
        return spec.replace(minimum=spec.minimum * scale, maximum=spec.maximum * scale)


class OneHotPlanes(_ObservationWrapper):
    """Images of codes `[H, W, C]` as float32`[P, H, W]` of zeros and ones: a plane for each code.

    The codes of a channel go from 0 to its largest bound. Other leaves of the observation stay as they are.
    For codes that are names, not quantities, such as MiniGrid's.
    """

    def __init__(self, environment: BatchedEnvironment):
        super().__init__(environment)
        inner = self.spec.observations
        self._codes = [_codes(leaf, f"{self.name}: observation") for leaf in tree.flatten(inner)]
        if all(codes is None for codes in self._codes):
            raise ValueError(
                f"{self.name}: got no image of codes in {inner}, expected bounded integers of three axes. "
                "Leave OneHotPlanes out."
            )
        planes = [
            leaf
            if codes is None
            else specs.BoundedArray((len(codes[1]), *leaf.shape[:2]), np.float32, 0.0, 1.0, name=leaf.name)
            for leaf, codes in zip(tree.flatten(inner), self._codes, strict=True)
        ]
        self.spec = self.spec._replace(observations=tree.unflatten_as(inner, planes))

    def _transform(self, timestep: dm_env.TimeStep) -> Nest:
        leaves = tree.flatten(timestep.observation)
        for index, codes in enumerate(self._codes):
            if codes is not None:
                planes = leaves[index].transpose(0, 3, 1, 2)[:, codes[0]] == codes[1]
                leaves[index] = planes.astype(np.float32)
        return tree.unflatten_as(timestep.observation, leaves)


def _codes(spec: specs.Array, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The channel `[P]` and the code `[P, 1, 1]` of each plane of an image; None for other leaves."""
    if len(spec.shape) != 3 or spec.dtype.kind not in "iu" or not isinstance(spec, specs.BoundedArray):
        return None
    low, high = (np.broadcast_to(bound, spec.shape) for bound in (spec.minimum, spec.maximum))
    if low.min() < 0 or high.max() > 63:
        raise ValueError(
            f"{name}: got codes from {low.min()} to {high.max()}, expected 0 to at most 63. Leave "
            "OneHotPlanes out for images of colors, which networks take as they are."
        )
    counts = high.max((0, 1)).astype(np.int64) + 1
    codes = np.concatenate([np.arange(count, dtype=spec.dtype) for count in counts])
    return np.repeat(np.arange(len(counts)), counts), codes[:, None, None]


class SinglePrecision(_ObservationWrapper):
    """float64 observations and actions as float32."""

    def __init__(self, environment: BatchedEnvironment):
        super().__init__(environment)
        # The inner environment converts the actions back.
        self.spec = self.spec._replace(
            observations=tree.map_structure(_single_spec, self.spec.observations),
            actions=tree.map_structure(_single_spec, self.spec.actions),
        )

    def _transform(self, timestep: dm_env.TimeStep) -> Nest:
        return tree.map_structure(
            lambda leaf: self._finite(leaf.astype(np.float32)) if leaf.dtype == np.float64 else leaf,
            timestep.observation,
        )


def _single_spec(spec: specs.Array) -> specs.Array:
    with np.errstate(over="ignore"):  # Larger bounds become infinite.
        return spec.replace(dtype=np.float32) if spec.dtype == np.float64 else spec


class Flatten(_ObservationWrapper):
    """Nested observations as one float32[n] vector per env: codes as one-hot vectors, bytes divided by 255.

    So networks see the same numbers as without it. Parts are in the order of `tree.flatten`, which sorts the
    keys of dicts.
    """

    def __init__(self, environment: BatchedEnvironment):
        super().__init__(environment)
        if specs.action_mask(self.spec.observations) is not None:
            raise ValueError(
                f"{self.name}: got an observation with {specs.ACTION_MASK}, expected one without: the mask "
                "would be lost. Leave Flatten out; agents take dicts."
            )
        leaves = tree.flatten(self.spec.observations)
        self._codes, self._bytes = list(map(specs.num_codes, leaves)), list(map(specs.is_bytes, leaves))
        sizes = [
            math.prod(leaf.shape) * (codes or 1) for leaf, codes in zip(leaves, self._codes, strict=True)
        ]
        self.spec = self.spec._replace(
            observations=specs.Array((sum(sizes),), np.float32, name="observation")
        )

    def _transform(self, timestep: dm_env.TimeStep) -> Nest:
        parts = []
        leaves = tree.flatten(timestep.observation)
        for codes, is_bytes, value in zip(self._codes, self._bytes, leaves, strict=True):
            if codes:
                value = np.arange(codes) == value[..., None]
            elif is_bytes:
                value = value / np.float32(255)
            parts.append(value.reshape(self.num_envs, -1))
        return self._finite(np.concatenate(parts, axis=1, dtype=np.float32))
