"""Specs: the shape, dtype and range of the inputs and outputs of one env of an environment.

Specs are `dm_env.specs` (`Array`, `BoundedArray`, `DiscreteArray`) in nests of dicts and tuples:

```python
environment = environments.make("gymnasium:CartPole-v1", num_envs=8)
spec = specs.make_environment_spec(environment)
spec.observations          # BoundedArray(shape=(4,), dtype=float32, ...): no env dimension
spec.actions.num_values    # 2
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tree
from dm_env.specs import Array, BoundedArray, DiscreteArray

from framework.types import Nest

Path = tuple[Any, ...]

# The entry of an observation that says which actions the environment takes; see `action_mask`.
ACTION_MASK = "action_mask"
# The entry that says whether it is the agent's turn, in a game in turns.
TURN = "turn"
# Most values of a discrete action or observation for which an agent makes its own networks.
MAX_VALUES = 1_000_000
# Environments without bounds name the largest number of their dtype, or half of it: both are beyond this.
_UNBOUNDED = 1e30

GoalOutcome = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]  # See `GoalReward`.


class EnvironmentSpec(NamedTuple):
    """The specs of one env of an environment. Each field is a nest of `dm_env.specs.Array`."""

    observations: Nest
    actions: Nest
    rewards: Nest
    discounts: Nest


def agents(spec: EnvironmentSpec) -> tuple[str, ...]:
    """The names of the agents of a multi-agent environment, sorted; empty for any other environment.

    In a multi-agent environment, each field of the spec is a dict with an entry for each agent.
    """
    if not all(isinstance(field, dict) for field in spec):
        return ()
    names = sorted(spec.observations)
    return tuple(names) if all(sorted(field) == names for field in spec) else ()


def agent_spec(spec: EnvironmentSpec, agent: str) -> EnvironmentSpec:
    """The spec of one agent of a multi-agent environment."""
    return EnvironmentSpec(*[field[agent] for field in spec])


class UnsupportedSpaceError(TypeError):
    """Raised for a gymnasium space that has no equivalent among arrays of a fixed shape."""


class _Stacked:
    """Common base of `StackedArray` and `StackedBoundedArray`."""

    __slots__ = ()

    @property
    def num_frames(self) -> int:
        """Number of time steps that an observation shows."""
        return self.shape[0]  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        return type(self), super().__reduce__()[1]


class StackedArray(_Stacked, Array):
    """An observation `[num_frames, ...]` of the newest frames, oldest first.

    Each time step that is not FIRST drops the oldest frame, shifts the others by one and appends a new frame.
    The environment chooses the frames before an episode's start.

    With this spec an environment guarantees this order, so that replay can store each frame once: see
    `frame_stack`. A wrapper that changes observations in any other way must return another spec.
    """

    __slots__ = ()


class StackedBoundedArray(_Stacked, BoundedArray):
    """A `StackedArray` with bounds."""

    __slots__ = ()


def frame_stack(observation_spec: Nest) -> int | None:
    """The number of frames if all leaves are stacks of the same number, at least 2; else None."""
    sizes = {leaf.num_frames if isinstance(leaf, _Stacked) else 0 for leaf in tree.flatten(observation_spec)}
    return sizes.pop() if len(sizes) == 1 and min(sizes) >= 2 else None


def unstacked(observation_spec: Nest) -> Nest:
    """The same shapes and bounds without the guarantee of `StackedArray`."""

    def plain(leaf: Array) -> Array:
        if isinstance(leaf, StackedBoundedArray):
            return BoundedArray(leaf.shape, leaf.dtype, leaf.minimum, leaf.maximum, name=leaf.name)
        return Array(leaf.shape, leaf.dtype, name=leaf.name) if isinstance(leaf, StackedArray) else leaf

    return tree.map_structure(plain, observation_spec)


#: Entries of the observations of a goal-conditioned environment, as in gymnasium-robotics' `GoalEnv`.
ACHIEVED_GOAL, DESIRED_GOAL = "achieved_goal", "desired_goal"


class GoalReward(Array):
    """A reward that is a function of goals: of the observations' `achieved_goal` and `desired_goal`.

    A wrapper that changes rewards or goals in another way must return another spec.

    Attributes:
      outcome: `outcome(achieved_goal, desired_goal)` of arrays `[n, ...]` returns the rewards, `[n]`, of the
        steps that led to the achieved goals, and whether they terminate the episode, bool `[n]`. It can be
        pickled.
    """

    __slots__ = ("outcome",)

    def __init__(self, shape: Any, dtype: Any, name: str | None, outcome: GoalOutcome):
        super().__init__(shape, dtype, name)
        self.outcome = outcome

    def __reduce__(self) -> Any:
        return type(self), (self.shape, self.dtype, self.name, self.outcome)


#: Entries of the rewards of an environment with costs.
REWARD, COST = "reward", "cost"


def has_goals(spec: EnvironmentSpec) -> bool:
    """Whether observations are a dict with both goals, of one shape and dtype, and rewards are numbers."""
    seen, reward = spec.observations, spec.rewards
    if not (isinstance(seen, Mapping) and {ACHIEVED_GOAL, DESIRED_GOAL} <= seen.keys()):
        return False
    achieved, desired = seen[ACHIEVED_GOAL], seen[DESIRED_GOAL]
    return isinstance(achieved, Array) and achieved == desired and getattr(reward, "shape", None) == ()


def goal_outcome(spec: EnvironmentSpec) -> GoalOutcome:
    """The `outcome` of a `GoalReward`. Raises ValueError, which says what the environment lacks."""
    if has_goals(spec) and isinstance(spec.rewards, GoalReward):
        return spec.rewards.outcome
    raise ValueError(
        f"goals: got an environment with the observations {spec.observations} and the reward {spec.rewards}, "
        f"expected a dict with {ACHIEVED_GOAL} and {DESIRED_GOAL} of one shape, and a GoalReward. "
        "environments.make declares it where an environment has such observations and a method "
        "compute_reward(achieved_goal, desired_goal, info), unless a wrapper changes them."
    )


def make_environment_spec(environment: Any) -> EnvironmentSpec:
    """The spec of anything with dm_env's four `*_spec()` methods, batched or not."""
    return EnvironmentSpec(
        observations=environment.observation_spec(),
        actions=environment.action_spec(),
        rewards=environment.reward_spec(),
        discounts=environment.discount_spec(),
    )


def from_space(space: Any, name: str = "observation") -> Nest:
    """Translates a gymnasium space to a nest of specs.

    Box becomes a `BoundedArray` (an `Array` where no bound is finite), Discrete a `DiscreteArray`,
    MultiDiscrete and MultiBinary a `BoundedArray` of integers, Dict a dict, Tuple a tuple. A Discrete
    space that starts at k != 0 becomes values 0 ... n-1. The environments add and subtract k (see
    `discrete_offsets`), so networks and one-hot codes always count from 0.

    The bounds may be one number for all elements. Broadcast them before indexing.

    Args:
      space: any gymnasium space.
      name: name of the specs, also used in errors.

    Raises:
      UnsupportedSpaceError: The space is Text, Graph, Sequence, OneOf or a space of another library.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        low, high = np.asarray(space.low), np.asarray(space.high)
        if not (_is_bound(low) | _is_bound(high)).any():
            return Array(space.shape, space.dtype, name=name)
        if len(space.shape) > 1 and (low == low.flat[0]).all() and (high == high.flat[0]).all():
            low, high = low.flat[0], high.flat[0]  # One bound for all pixels is readable when printed.
        return BoundedArray(space.shape, space.dtype, minimum=low, maximum=high, name=name)
    if isinstance(space, spaces.Discrete):
        return DiscreteArray(int(space.n), dtype=space.dtype, name=name)
    if isinstance(space, spaces.MultiDiscrete):
        first = np.asarray(getattr(space, "start", np.zeros_like(space.nvec)), dtype=space.dtype)
        last = (first + space.nvec - 1).astype(space.dtype)
        return BoundedArray(space.shape, space.dtype, minimum=first, maximum=last, name=name)
    if isinstance(space, spaces.MultiBinary):
        return BoundedArray(space.shape, space.dtype, minimum=0, maximum=1, name=name)
    if isinstance(space, spaces.Dict):
        return {key: from_space(child, f"{name}/{key}") for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(from_space(child, f"{name}/{index}") for index, child in enumerate(space.spaces))
    raise UnsupportedSpaceError(
        f"{name}: the space {space!r} is not supported; expected Box, Discrete, MultiDiscrete, MultiBinary, "
        "Dict or Tuple. Wrap the environment so that it gives arrays of a fixed shape "
        "(gymnasium.ObservationWrapper, gymnasium.ActionWrapper)."
    )


def from_spaces(observation_space: Any, action_space: Any) -> EnvironmentSpec:
    """The spec of a gymnasium environment: float32 rewards, discounts in [0, 1]."""
    return EnvironmentSpec(
        observations=from_space(observation_space, "observation"),
        actions=from_space(action_space, "action"),
        rewards=Array((), np.float32, name="reward"),
        discounts=BoundedArray((), np.float32, minimum=0.0, maximum=1.0, name="discount"),
    )


def to_space(spec: Nest) -> Any:
    """The gymnasium space of a nest of specs: of `from_space`, but for the starts of Discrete spaces."""
    from gymnasium import spaces

    if isinstance(spec, dict):
        return spaces.Dict({key: to_space(child) for key, child in spec.items()})
    if isinstance(spec, tuple | list):
        return spaces.Tuple([to_space(child) for child in spec])
    if isinstance(spec, DiscreteArray):
        return spaces.Discrete(spec.num_values)
    low: Any = -np.inf
    high: Any = np.inf
    if isinstance(spec, BoundedArray):
        low, high = (np.broadcast_to(bound, spec.shape) for bound in (spec.minimum, spec.maximum))
    elif spec.dtype.kind in "iub":
        info = np.iinfo(np.uint8 if spec.dtype.kind == "b" else spec.dtype)
        low, high = info.min, info.max
    return spaces.Box(low, high, spec.shape, spec.dtype.type)


def discrete_offsets(space: Any) -> list[int]:
    """The `start` of each Discrete leaf, in the order of `tree.flatten(from_space(space))`; 0 for others."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        # tree.flatten visits the keys of a dict in sorted order.
        return [offset for key in sorted(space.spaces) for offset in discrete_offsets(space.spaces[key])]
    if isinstance(space, spaces.Tuple):
        return [offset for child in space.spaces for offset in discrete_offsets(child)]
    return [int(space.start) if isinstance(space, spaces.Discrete) else 0]


def action_mask(observation: Nest) -> Any:
    """The entry `action_mask` of an observation or of its spec, however deep; None without one."""
    if isinstance(observation, dict):
        if ACTION_MASK in observation:
            return observation[ACTION_MASK]
        observation = tuple(observation.values())
    if isinstance(observation, tuple | list):
        for child in observation:
            if isinstance(child, dict | tuple | list) and (found := action_mask(child)) is not None:
                return found
    return None


def num_discrete_actions(action_spec: Any) -> int:
    """The number of values of one discrete action.

    Raises:
      ValueError: The spec is not a `DiscreteArray`.
    """
    if not isinstance(action_spec, DiscreteArray):
        raise ValueError(
            f"action spec: got {action_spec!r}, expected one discrete action. Use an agent for continuous "
            "actions, or for several (docs/agents.md); --wrappers CombineActions makes one of discrete ones."
        )
    return int(action_spec.num_values)


def check_sizes(spec: EnvironmentSpec) -> None:
    """Raises ValueError for spaces with more values than networks can have weights for."""
    for field, nest in (("observation", spec.observations), ("action", spec.actions)):
        for path, leaf in leaves(nest):
            if field == "observation" and not isinstance(leaf, DiscreteArray):
                continue
            if not isinstance(leaf, BoundedArray) or leaf.dtype.kind not in "iu":
                continue
            # The spec's dtype need not hold their number.
            count = np.max(np.asarray(leaf.maximum, np.float64) - leaf.minimum + 1, initial=0)
            if count > MAX_VALUES:
                raise ValueError(
                    f"{path_name(field, path)}: got a space of {count:,.0f} values, expected at most "
                    f"{MAX_VALUES:,}: networks have weights for each. Use a Box, or your own networks_fn."
                )


def batch(name: str, spec: Nest, values: Nest, count: int | None = None) -> Nest:
    """`values`, a nest like `spec`, as arrays `[B, *shape]` of its dtypes, one row for each env.

    Args:
      name: what the values are, for errors.
      spec: the specs of a row.
      values: arrays, or what `np.asarray` takes, of `[B, *shape]`.
      count: B. None is the length of the first leaf.

    Raises:
      ValueError: The nest, a shape, a dtype, or a value does not fit the spec.
    """
    try:
        first = np.shape(tree.flatten_up_to(spec, values)[0])
    except (TypeError, ValueError) as error:  # Only now: the text of a spec takes longer than a policy acts.
        raise ValueError(f"{name}: got a nest that does not fit the spec {spec}: {error}") from error
    count = (first[0] if first else 1) if count is None else count

    def check(path: Path, leaf: Array, value: Any) -> Any:
        array, where = np.asarray(value), path_name(name, path)
        expected, advice = (count, *leaf.shape), ""
        if array.shape == leaf.shape:
            expected = (1, *leaf.shape)
            advice = f" Add a batch dimension to values of a single env: [{name}], or each leaf."
        if array.shape != expected:
            raise ValueError(
                f"{where}: got shape {array.shape}, expected {expected}, one row for each env.{advice}"
            )
        are_integers = array.dtype.kind in "iu" and np.dtype(leaf.dtype).kind in "iu"  # A list has int64.
        if not are_integers and not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            raise ValueError(
                f"{where}: got dtype {array.dtype}, expected {np.dtype(leaf.dtype)} (the spec's). Convert it."
            )
        given = array
        with np.errstate(invalid="ignore", over="ignore"):  # Numbers that do not fit are told below.
            array = array.astype(leaf.dtype, copy=False)
        if array.dtype != given.dtype and array.dtype.kind in "iu" and np.count_nonzero(array != given):
            wrong = given[array != given][0]
            raise ValueError(f"{where}: got {wrong}, expected a number that {array.dtype} holds.")
        if wrong := wrong_value(leaf, array):
            raise ValueError(f"{where}: got {wrong}.")
        return array

    return tree.map_structure_with_path(check, spec, values)


def flags(name: str, values: Any, count: int) -> np.ndarray:
    """`values` as bools `[count]`.

    Raises:
      ValueError: They are not bools `[count]`, nor one for all.
    """
    given = np.asarray(values)
    flags = given.astype(np.bool_)
    if given.dtype.kind not in "iubf" or np.count_nonzero(flags != given):
        raise ValueError(f"{name}: got {values!r:.80}, expected bools.")
    if flags.shape not in ((), (count,)):
        raise ValueError(
            f"{name}: got shape {flags.shape}, expected {(count,)}, one for each env, or one for all."
        )
    return np.broadcast_to(flags, count)


def wrong_value(spec: Array, array: np.ndarray) -> str | None:
    """What is wrong with the values of an array: not finite, or outside a Discrete space; None: nothing."""
    if array.dtype.kind == "f" and np.count_nonzero(np.isfinite(array)) != array.size:
        return f"{array[~np.isfinite(array)][0]}, expected finite numbers of {spec.dtype}"
    if isinstance(spec, DiscreteArray):
        outside = (array < 0) | (array >= spec.num_values)
        if np.count_nonzero(outside):
            return f"{array[outside][0]}, expected 0 to {spec.num_values - 1}"
    return None


def has_action_mask(spec: EnvironmentSpec) -> bool:
    """Whether the observations of an environment of one agent have an `action_mask` that fits the actions."""
    if agents(spec) or (mask := action_mask(spec.observations)) is None:
        return False
    shapes = [leaf.shape for leaf in tree.flatten(mask)]
    return (
        all(len(shape) == 1 for shape in shapes) and sum(map(sum, shapes)) == sum(choices(spec.actions)) > 0
    )


def choices(action_spec: Nest) -> list[int]:
    """The number of values of each choice of an action, in the order of `tree.flatten`. Floats have none.

    A mask has an entry for each of these values.
    """
    found: list[int] = []
    for leaf in tree.flatten(action_spec):
        if isinstance(leaf, BoundedArray) and leaf.dtype.kind in "iu":
            counts = leaf.maximum.astype(np.int64) - leaf.minimum.astype(np.int64) + 1
            found += np.broadcast_to(counts, leaf.shape).reshape(-1).tolist()
    return found


def num_codes(spec: Array) -> int:
    """The number of values of each code, if the integers of an observation are codes; else 0."""
    if isinstance(spec, DiscreteArray):
        return int(spec.num_values)
    # FrameStack turns a DiscreteArray into one axis of integers from 0 on.
    if isinstance(spec, StackedBoundedArray) and len(spec.shape) == 1 and spec.dtype.kind in "iu":
        return 0 if np.any(spec.minimum) else int(np.max(spec.maximum)) + 1
    return 0


def is_bytes(spec: Array) -> bool:
    """Whether the numbers of an observation are 0 to 255, which networks and `Flatten` divide by 255."""
    if not isinstance(spec, BoundedArray):
        return bool(spec.dtype == np.uint8)
    return spec.dtype.kind in "iu" and bool((spec.minimum == 0).all() and (spec.maximum == 255).all())


def legal(spec: EnvironmentSpec, observation: Nest, action: Nest) -> np.ndarray:
    """bool`[B]`: whether the mask in a batch of observations allows the actions, which it must fit."""
    mask = np.concatenate(tree.flatten(action_mask(observation)), -1)
    chosen = [
        (np.asarray(array, np.int64) - leaf.minimum).reshape(len(mask), -1)
        for leaf, array in zip(tree.flatten(spec.actions), tree.flatten(action), strict=True)
        if choices(leaf)
    ]
    index = np.concatenate(chosen, 1) + np.cumsum([0, *choices(spec.actions)])[:-1]
    allowed: np.ndarray = np.logical_and.reduce(np.take_along_axis(mask, index, 1) > 0, axis=1)
    return allowed


def leaves(spec: Nest) -> list[tuple[Path, Array]]:
    """`(path, spec)` of each leaf, in the order of `tree.flatten`."""
    return [(tuple(path), leaf) for path, leaf in tree.flatten_with_path(spec)]


def path_name(field: str, path: Path) -> str:
    """The name of a leaf in errors, and of its column in replay, such as `observation/camera/0`."""
    return "/".join([field, *(str(key) for key in path)])


def pick(nest: Nest, path: Path) -> Any:
    """The value at `path`; named tuples by field name, other tuples and dicts by index or key."""
    for key in path:
        is_field = isinstance(key, str) and not isinstance(nest, dict) and hasattr(nest, key)
        nest = getattr(nest, key) if is_field else nest[key]
    return nest


def extra_parts(spec: Nest, value: Nest) -> list[str]:
    """The names of the parts of `value` that `spec` lacks, for which `pick` is never called."""
    if not tree.is_nested(spec) or not tree.is_nested(value):
        return []
    has_names = isinstance(spec, Mapping) or hasattr(spec, "_fields")
    known, given = (
        each._asdict()
        if has_names and hasattr(each, "_fields")
        else each
        if isinstance(each, Mapping)
        else dict(enumerate(each))
        for each in (spec, value)
    )
    return [str(key) for key in given if key not in known] + [
        f"{key}/{name}" for key in known if key in given for name in extra_parts(known[key], given[key])
    ]


def bounds(spec: Array) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest value of each number of a leaf, float64`[*shape]`; infinite without one.

    The largest float of a dtype, and any number above 1e30, is no bound.
    """
    low, high = (getattr(spec, name, -np.inf) for name in ("minimum", "maximum"))
    return tuple(  # type: ignore[return-value]
        np.where(_is_bound(bound), bound, none) * np.ones(spec.shape)
        for bound, none in ((low, -np.inf), (high, np.inf))
    )


def _is_bound(bound: Any) -> np.ndarray:
    """Whether each bound is one: neither infinite nor the largest float of its dtype, or half of that."""
    bound = np.asarray(bound)
    largest = min(_UNBOUNDED, float(np.finfo(bound.dtype).max) / 2) if bound.dtype.kind == "f" else np.inf
    return abs(bound.astype(np.float64)) < largest


def is_bounded(spec: Array) -> bool:
    """Whether all numbers of a leaf have both bounds."""
    return bool(np.isfinite(bounds(spec)).all())


def zeros(spec: Nest, batch_shape: tuple[int, ...] = ()) -> Nest:
    """A nest of zeros of `[*batch_shape, *shape]` in the specs' dtypes (not necessarily within bounds)."""
    return tree.map_structure(lambda leaf: np.zeros((*batch_shape, *leaf.shape), leaf.dtype), spec)
