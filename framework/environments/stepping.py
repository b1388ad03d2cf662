"""B environments stepped in the caller's thread: one after the other, or together by gymnasium."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments import states
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment, EnvironmentFault
from framework.environments.single import SingleEnv
from framework.types import Nest


class ArrayChecker:
    """Converts a nest from outside to arrays `[B, *shape]` of a spec's dtypes, or raises EnvironmentFault."""

    def __init__(
        self, name: str, field: str, spec: Nest, num_envs: int, *, offsets: Sequence[int] = (), fix: str = ""
    ):
        """Makes the checker of one field.

        Args:
          name: the environment's name, for errors.
          field: `action`, `observation` or `reward`, for errors. Integers of an action must be within the
            spec's bounds, too.
          spec: the spec of one env.
          num_envs: B.
          offsets: a number to add to each leaf.
          fix: what to do about a value that does not fit, for errors.
        """
        self._name, self._field, self._spec, self._fix = name, field, spec, fix
        # A spec's properties are Python calls: read once, not at every step.
        self._leaves: list[tuple[specs.Path, tuple[int, ...], np.dtype, Any, int]] = []
        leaves = specs.leaves(spec)
        for (path, leaf), offset in zip(leaves, offsets or [0] * len(leaves), strict=True):
            bounded = field == "action" and isinstance(leaf, specs.BoundedArray) and leaf.dtype.kind in "iu"
            bounds = (leaf.minimum, leaf.maximum) if bounded else None
            self._leaves.append((path, (num_envs, *leaf.shape), leaf.dtype, bounds, offset))

    def __call__(self, nest: Nest) -> list[np.ndarray]:
        """One array per leaf of the spec, in the order of `tree.flatten`; possibly the caller's own."""
        arrays = []
        for path, shape, dtype, bounds, offset in self._leaves:
            try:
                array = np.asarray(specs.pick(nest, path) if path else nest)
            except (KeyError, IndexError, TypeError) as error:
                raise EnvironmentFault(
                    f"{self._name}: the {self._field}'s structure is {tree.map_structure(type, nest)}, which "
                    f"lacks a part of the {self._field} spec {self._spec}. Return one array per leaf of it."
                ) from error
            if array.shape != shape:
                raise self._fault(path, f"has shape {array.shape}, expected {shape}")
            if array.dtype != dtype:
                if array.dtype.kind not in ("iub" if dtype.kind in "iub" else "iubf"):
                    raise self._fault(path, f"has dtype {array.dtype}, expected {dtype}")
                array = array.astype(dtype)
            # On a batch of small arrays count_nonzero() takes a fifth of the time of all().
            if dtype.kind == "f":
                if np.count_nonzero(np.isfinite(array)) != array.size:
                    env = _first_env(~np.isfinite(array))
                    raise self._fault(path, f"of env {env} is {array[env]!r}, which is not finite")
            elif bounds is not None:
                outside = (array < bounds[0]) | (array > bounds[1])
                if np.count_nonzero(outside):
                    env = _first_env(outside)
                    raise self._fault(
                        path, f"of env {env} is {array[env]!r}, outside {bounds[0]} ... {bounds[1]}"
                    )
            arrays.append(array + offset if offset else array)
        return arrays

    def _fault(self, path: specs.Path, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._name}: {specs.path_name(self._field, path)} {what}. {self._fix}")


def action_checker(name: str, spec: Nest, num_envs: int, offsets: Sequence[int] = ()) -> ArrayChecker:
    """The checker of the actions that a policy gives to an environment."""
    fix = (
        "Return one finite action per env within action_spec(); check the policy's parameters and losses for "
        "NaN."
    )
    return ArrayChecker(name, "action", spec, num_envs, offsets=offsets, fix=fix)


def _fits(value: Any, path: specs.Path, leaf: specs.Array) -> bool:
    """Whether one env's reward or discount has the shape of its spec."""
    try:
        return np.asarray(specs.pick(value, path), leaf.dtype).shape == leaf.shape
    except (KeyError, IndexError, TypeError, ValueError):
        return False


def _first_env(bad: np.ndarray) -> int:
    """The first env with a bad value, of bool `[B, ...]`."""
    return int(np.nonzero(bad.reshape(len(bad), -1).any(axis=1))[0][0])


def buffer_layout(spec: specs.EnvironmentSpec, num_envs: int) -> np.dtype:
    """The memory of one time step of B envs."""
    fields: list[Any] = [("step_type", np.int64, (num_envs,))]
    for name, nest in (
        ("reward", spec.rewards),
        ("discount", spec.discounts),
        ("observation", spec.observations),
    ):
        for index, leaf in enumerate(tree.flatten(nest)):
            fields.append((f"{name}/{index}", leaf.dtype, (num_envs, *leaf.shape)))
    return np.dtype(fields, align=True)


class Buffers:
    """Two time steps of B envs, filled in turn: the previous one is intact while the next is written.

    Attributes:
      step_types: of each of the two.
      columns: of each of the two, the arrays `[B, *shape]` of `reward`, `discount` and `observation`, one per
        leaf of the spec.
      timesteps: views of these arrays.
    """

    def __init__(
        self, spec: specs.EnvironmentSpec, num_envs: int, memory: Any = None, rows: slice = slice(None)
    ):
        """Makes the buffers of `rows` of the B envs, in `memory` of two layouts or in memory of their own."""
        layout = buffer_layout(spec, num_envs)
        slots = np.zeros(2, layout) if memory is None else np.frombuffer(memory, layout, count=2)
        fields = {"reward": spec.rewards, "discount": spec.discounts, "observation": spec.observations}
        self.step_types = [slots["step_type"][slot][rows] for slot in range(2)]
        self.columns: list[dict[str, list[np.ndarray]]] = []
        self.timesteps: list[dm_env.TimeStep] = []
        for slot in range(2):
            columns = {
                name: [slots[f"{name}/{index}"][slot][rows] for index in range(len(tree.flatten(nest)))]
                for name, nest in fields.items()
            }
            parts = {name: nests.unflattener(fields[name])(columns[name]) for name in fields}
            self.columns.append(columns)
            self.timesteps.append(dm_env.TimeStep(step_type=self.step_types[slot], **parts))


class InlineEnvironment(BatchedEnvironment):
    """Steps each env in turn and writes the results into buffers that are made once."""

    can_step_envs = True

    def __init__(self, name: str, make_envs: Sequence[Callable[[], SingleEnv]], *, first_env: int = 0):
        """Builds the envs.

        Args:
          name: for errors.
          make_envs: one function per env.
          first_env: the number of env 0 in errors (a process has only some of all envs).
        """
        self.name = name
        self.num_envs = len(make_envs)
        self._first_env = first_env
        self._envs: list[SingleEnv] = []
        try:
            for index, make in enumerate(make_envs):
                self._envs.append(make())
                if self._envs[index].spec != self._envs[0].spec:
                    raise EnvironmentFault(
                        f"{name}, env {first_env + index}: got the spec {self._envs[index].spec}, expected "
                        f"{self._envs[0].spec} as in env {first_env}. All envs must have the same spec."
                    )
        except BaseException:
            self.close()
            raise
        self.spec = self._envs[0].spec
        self._check_action = action_checker(
            name, self.spec.actions, self.num_envs, self._envs[0].action_starts
        )
        # Discrete actions are given as Python's ints, all others as arrays.
        self._discrete = [
            leaf.shape == () and leaf.dtype.kind in "iu" for leaf in tree.flatten(self.spec.actions)
        ]
        self._build_action = nests.unflattener(self.spec.actions)
        self._single_action = not tree.is_nested(self.spec.actions)
        self._single_observation = not tree.is_nested(self.spec.observations)
        self._leaves = {
            "reward": specs.leaves(self.spec.rewards),
            "discount": specs.leaves(self.spec.discounts),
            "observation": specs.leaves(self.spec.observations),
        }
        # Per leaf of the observation, dtypes seen before that its column can hold without loss of kind.
        self._accepted = [{leaf.dtype} for _, leaf in self._leaves["observation"]]
        # The reward and the discount of the step that starts an episode.
        self._first_reward = specs.zeros(self.spec.rewards)
        self._first_discount = tree.map_structure(np.ones_like, specs.zeros(self.spec.discounts))
        self.use(Buffers(self.spec, self.num_envs))
        self._step_types = [LAST] * self.num_envs  # LAST: the next step starts an episode

    def use(self, buffers: Buffers) -> None:
        """Writes the time steps to come into `buffers`."""
        self._buffers = buffers
        self._slot = 0

    def reset(self) -> dm_env.TimeStep:
        self._step_types = [LAST] * self.num_envs
        self._slot = 1 - self._slot
        return self._advance([None] * self.num_envs, range(self.num_envs))

    def step(self, action: Nest) -> dm_env.TimeStep:
        actions = self._split(action)
        self._slot = 1 - self._slot
        return self._advance(actions, range(self.num_envs))

    def step_envs(self, action: Nest, active: np.ndarray) -> dm_env.TimeStep:
        # In the present slot: the other envs' values stay where they are.
        return self._advance(self._split(action), np.nonzero(active)[0].tolist())

    def end_episodes(self, envs: np.ndarray) -> None:
        for env in np.nonzero(envs)[0]:
            self._step_types[env] = LAST

    def state(self) -> bytes:
        return pickle.dumps(self.env_states())

    def set_state(self, state: bytes) -> None:
        self.set_env_states(load_env_states(self, state))

    def env_states(self) -> list[tuple[int, bytes]]:
        """Per env, the type of its last step and its state."""
        names = [f"{self.name}, env {self._first_env + env}" for env in range(self.num_envs)]
        kept = [env.state(name) for env, name in zip(self._envs, names, strict=True)]
        return list(zip(self._step_types, kept, strict=True))

    def set_env_states(self, env_states: list[tuple[int, bytes]]) -> None:
        """Restores what `env_states` returned."""
        for env, (step_type, state) in enumerate(env_states):
            self._envs[env].set_state(state)
            self._step_types[env] = step_type

    def _split(self, action: Nest) -> Sequence[Nest]:
        """The action of each env. Copied, since environments may keep it and policies may reuse theirs."""
        per_leaf: list[Sequence[Any]] = [
            array.tolist() if discrete else list(array.copy())
            for array, discrete in zip(self._check_action(action), self._discrete, strict=True)
        ]
        if self._single_action:
            return per_leaf[0]
        return [self._build_action([leaf[env] for leaf in per_leaf]) for env in range(self.num_envs)]

    def _advance(self, actions: Sequence[Nest], envs: Sequence[int]) -> dm_env.TimeStep:
        step_types = self._step_types
        columns = self._buffers.columns[self._slot]
        single = self._single_observation
        if single:
            observations, accepted = columns["observation"][0], self._accepted[0]
            shape = observations.shape[1:]
        rewards: list[Any] = [self._first_reward] * len(envs)
        discounts: list[Any] = [self._first_discount] * len(envs)
        for index, env in enumerate(envs):
            environment = self._envs[env]
            try:
                if step_types[env] == LAST:
                    observation = environment.reset()
                    step_types[env] = FIRST
                else:
                    observation, rewards[index], discounts[index], step_types[env] = environment.step(
                        actions[env]
                    )
            except Exception as error:
                call = "reset()" if step_types[env] == LAST else f"step({actions[env]!r})"
                raise self._fault(env, f"{call} raised {type(error).__name__}: {error}") from error
            if (
                single
                and type(observation) is np.ndarray
                and observation.shape == shape
                and observation.dtype in accepted
            ):
                observations[env] = observation  # as _store_observation() would, without a call for each env
            else:
                self._store_observation(env, observation)
        rows: Any = slice(None) if len(envs) == self.num_envs else envs
        for column, start in zip(columns["observation"], self._envs[0].observation_starts, strict=True):
            if start:
                column[rows] -= start
        self._store_results("reward", rewards, envs, rows)
        self._store_results("discount", discounts, envs, rows)
        self._buffers.step_types[self._slot][:] = step_types
        for field, arrays in columns.items():
            for (path, _), array in zip(self._leaves[field], arrays, strict=True):
                # On a batch of small arrays count_nonzero() takes a fifth of the time of all().
                if array.dtype.kind == "f" and np.count_nonzero(np.isfinite(array)) != array.size:
                    env = _first_env(~np.isfinite(array))
                    what = "NaN" if np.isnan(array[env]).any() else "infinity"
                    raise self._fault(
                        env,
                        f"{specs.path_name(field, path)} holds {what}: {array[env]!r}; expected finite "
                        "numbers. Find where the environment divides by zero or diverges, and end the "
                        "episode there",
                    )
        return self._buffers.timesteps[self._slot]

    def _store_observation(self, env: int, observation: Nest) -> None:
        columns = self._buffers.columns[self._slot]["observation"]
        for (path, leaf), column, accepted in zip(
            self._leaves["observation"], columns, self._accepted, strict=True
        ):
            place = specs.path_name("observation", path)
            try:
                value = specs.pick(observation, path)
            except (KeyError, IndexError, TypeError) as error:
                raise self._fault(
                    env,
                    f"{place} is missing from the observation, whose structure is "
                    f"{tree.map_structure(type, observation)}; expected that of observation_spec()",
                ) from error
            array = np.asarray(value)
            if array.shape != leaf.shape:
                raise self._fault(
                    env,
                    f"{place} has shape {array.shape}, expected {leaf.shape} as in observation_spec(); make "
                    "the two agree",
                )
            if array.dtype not in accepted:
                if np.can_cast(array.dtype, leaf.dtype, "same_kind"):
                    accepted.add(array.dtype)
                # Python's ints and bools have no dtype of their own to insist on.
                elif type(value) not in (int, bool) or leaf.dtype.kind not in "iuf":
                    raise self._fault(
                        env,
                        f"{place} has dtype {array.dtype}, which does not fit {leaf.dtype} of "
                        "observation_spec(); convert it in the environment",
                    )
            column[env] = array

    def _store_results(self, field: str, values: list[Any], envs: Sequence[int], rows: Any) -> None:
        """Stores the rewards or discounts of `envs`, which `rows` selects in the columns."""
        columns = self._buffers.columns[self._slot][field]
        for (path, leaf), column in zip(self._leaves[field], columns, strict=True):
            try:
                parts = [specs.pick(value, path) for value in values] if path else values
                array = np.asarray(parts, leaf.dtype)
                if not leaf.shape:
                    array = array.reshape(len(envs))  # one number may come as an array of one number
                elif array.shape != (len(envs), *leaf.shape):
                    raise ValueError(f"got shape {array.shape}")
            except (KeyError, IndexError, TypeError, ValueError) as error:
                bad = [index for index, value in enumerate(values) if not _fits(value, path, leaf)]
                index = bad[0] if bad else 0
                expected = f"an array of shape {leaf.shape}" if leaf.shape else "one number"
                raise self._fault(
                    envs[index],
                    f"{specs.path_name(field, path)}: got {values[index]!r}, expected {expected} as in "
                    f"{field}_spec(); convert it in the environment",
                ) from error
            column[rows] = array

    def _fault(self, env: int, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self.name}, env {self._first_env + env}: {what}.")

    def render(self, env: int = 0) -> np.ndarray:
        picture = self._envs[env].render()
        if not isinstance(picture, np.ndarray):
            raise NotImplementedError(
                f"{self.name}: render() gave {type(picture).__name__}, expected an array; make the "
                "environment with render_mode='rgb_array'."
            )
        return picture

    def close(self) -> None:
        """Closes every env, also if some fail; the first failure is raised at the end."""
        first_error: Exception | None = None
        while self._envs:
            try:
                self._envs.pop().close()
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error


def load_env_states(environment: BatchedEnvironment, state: bytes) -> list[tuple[int, bytes]]:
    """Per env of `environment`, the type of its last step and its state."""
    env_states = pickle.loads(state)
    if len(env_states) != environment.num_envs:
        raise ValueError(
            f"{environment.name}: state: got the state of {len(env_states)} envs, expected "
            f"{environment.num_envs}. Make the environment with as many envs as the saved one."
        )
    return env_states


class VectorEnvironment(BatchedEnvironment):
    """A `gymnasium.vector.VectorEnv` in `NEXT_STEP` autoreset mode, which computes all envs together.

    All envs may share one random generator (CartPole's do). The episodes of env i then depend on the number
    of envs, unlike with the other ways to step.
    """

    def __init__(self, name: str, environment: Any, seed: int | None):
        """Takes over `environment`, which must not have been reset yet.

        Raises:
          ValueError: the environment resets in another mode than NEXT_STEP.
        """
        self.name = name
        self._environment = environment
        self.num_envs = int(environment.num_envs)
        mode = autoreset_mode(environment)
        if mode != "NextStep":
            raise ValueError(
                f"{name}: the vector environment's autoreset mode is {mode!r}, expected NEXT_STEP: otherwise "
                "the last observation of an episode is lost. Use stepping='inline' or 'processes', or make "
                "the vector environment with autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP."
            )
        self._seed = seed
        space, action_space = environment.single_observation_space, environment.single_action_space
        self.spec = specs.from_spaces(space, action_space)
        self._build_observation = nests.unflattener(self.spec.observations)
        self._build_action = nests.unflattener(self.spec.actions)
        self._check_action = action_checker(
            name, self.spec.actions, self.num_envs, specs.discrete_offsets(action_space)
        )
        fix = "Find where the environment divides by zero or diverges, or make it agree with its spec."
        self._check_observation = ArrayChecker(
            name,
            "observation",
            self.spec.observations,
            self.num_envs,
            offsets=[-start for start in specs.discrete_offsets(space)],
            fix=fix,
        )
        self._check_reward = ArrayChecker(name, "reward", self.spec.rewards, self.num_envs, fix=fix)
        self._over: np.ndarray | None = None  # bool[B]: envs whose last step was LAST; None before a reset

    def reset(self) -> dm_env.TimeStep:
        seed, self._seed = self._seed, None
        try:
            observation, _ = self._environment.reset(seed=seed)
        except Exception as error:
            raise EnvironmentFault(f"{self.name}: reset() raised {type(error).__name__}: {error}.") from error
        envs = self.num_envs
        self._over = np.zeros(envs, bool)
        return dm_env.TimeStep(
            step_type=np.full(envs, FIRST, np.int64),
            reward=np.zeros(envs, np.float32),
            discount=np.ones(envs, np.float32),
            observation=self._build_observation(self._check_observation(observation)),
        )

    def step(self, action: Nest) -> dm_env.TimeStep:
        arrays = self._check_action(action)
        if self._over is None:  # dm_env: a step before any reset is a reset
            return self.reset()
        try:
            observation, reward, terminated, truncated, _ = self._environment.step(self._build_action(arrays))
        except Exception as error:
            raise EnvironmentFault(f"{self.name}: step() raised {type(error).__name__}: {error}.") from error
        observation = self._build_observation(self._check_observation(observation))
        reward = self._check_reward(reward)[0]
        over = terminated | truncated
        step_type = np.where(over, LAST, MID)
        discount = 1.0 - terminated.astype(np.float32)
        if np.count_nonzero(self._over):
            step_type[self._over] = FIRST
            reward = np.where(self._over, np.float32(0), reward)
            discount[self._over] = 1.0
            over = over & ~self._over
        self._over = over
        return dm_env.TimeStep(step_type, reward, discount, observation)

    def state(self) -> bytes:
        return states.dump(self.name, (self._environment, self._seed, self._over))

    def set_state(self, state: bytes) -> None:
        environment = self._environment
        self._environment, self._seed, self._over = states.load(state)
        environment.close()

    def render(self, env: int = 0) -> np.ndarray:
        pictures = self._environment.render()
        if pictures is None:
            raise NotImplementedError(f"{self.name}: make the environment with render_mode='rgb_array'.")
        return np.asarray(pictures[env])

    def close(self) -> None:
        self._environment.close()


def autoreset_mode(environment: Any) -> str | None:
    """`NextStep`, `SameStep` or `Disabled` as a gymnasium vector environment declares it, or None."""
    mode = (getattr(environment, "metadata", None) or {}).get("autoreset_mode")
    return getattr(mode, "value", mode)
