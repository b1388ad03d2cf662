"""B environments stepped one after the other in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.base import (
    FIRST,
    LAST,
    ActionChecker,
    BatchedEnvironment,
    Buffers,
    EnvironmentFault,
    check_finite,
)
from framework.environments.single import SingleEnv
from framework.types import Nest


class InlineEnvironment(BatchedEnvironment):
    """Steps each env in turn and writes the results into buffers that are made once."""

    can_step_envs = True
    can_end_episodes = True

    def __init__(
        self,
        name: str,
        make_envs: Sequence[Callable[[], SingleEnv]],
        *,
        first_env: int = 0,
        allocate: Callable[..., np.ndarray] | None = None,
    ):
        """Builds the envs.

        Args:
          name: for errors.
          make_envs: one function per env.
          first_env: the number by which errors call env 0 (a process has only some of all envs).
          allocate: makes the buffers' arrays, see `Buffers`.
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
        self._check_action = ActionChecker(name, self.spec.actions, self.num_envs)
        self._discrete = [
            leaf.shape == () and leaf.dtype.kind in "iu" for _, leaf in specs.leaves(self.spec.actions)
        ]
        self._build_action = nests.unflattener(self.spec.actions)
        self._single_action = not tree.is_nested(self.spec.actions)
        self._columns = specs.leaves(self.spec.observations)
        self._single_observation = not tree.is_nested(self.spec.observations)
        # Leaves of rewards and discounts that are nested or arrays; None for plain numbers.
        self._parts = {
            field: specs.leaves(spec) if tree.is_nested(spec) or spec.shape != () else None
            for field, spec in (("reward", self.spec.rewards), ("discount", self.spec.discounts))
        }
        self._shapes = [leaf.shape for _, leaf in self._columns]
        # dtypes seen before that may be stored in a column without loss of kind.
        self._accepted = [{leaf.dtype} for _, leaf in self._columns]
        self._buffers = Buffers(self.spec, self.num_envs, allocate)
        self._step_types = [LAST] * self.num_envs  # LAST: the next step starts an episode

    def reset(self) -> dm_env.TimeStep:
        self._step_types = [LAST] * self.num_envs
        slot = self._buffers.flip()
        return self._advance(slot, [None] * self.num_envs, range(self.num_envs))

    def step(self, action: Nest) -> dm_env.TimeStep:
        actions = self._split(action)
        return self._advance(self._buffers.flip(), actions, range(self.num_envs))

    def step_envs(self, action: Nest, active: np.ndarray) -> dm_env.TimeStep:
        actions = self._split(action)
        # In place: the other envs' values stay where they are.
        return self._advance(self._buffers.current, actions, np.nonzero(active)[0].tolist())

    def end_episodes(self, envs: np.ndarray) -> None:
        for env in np.nonzero(envs)[0]:
            self._step_types[env] = LAST

    def _split(self, action: Nest) -> list[Nest]:
        """The action of each env. Copied, since environments may keep it and policies may reuse theirs."""
        arrays = self._check_action(action)
        if self._single_action and self._discrete[0]:
            return arrays[0].tolist()
        per_leaf: list[Sequence[Any]] = [
            array.tolist() if discrete else list(array.copy())
            for array, discrete in zip(arrays, self._discrete, strict=True)
        ]
        if self._single_action:
            return list(per_leaf[0])
        return [self._build_action([leaf[env] for leaf in per_leaf]) for env in range(self.num_envs)]

    def _advance(self, slot: int, actions: Sequence[Nest], envs: Sequence[int]) -> dm_env.TimeStep:
        step_types = self._step_types
        single = self._single_observation
        if single:
            rows, shape, accepted = self._buffers.observations[slot][0], self._shapes[0], self._accepted[0]
        rewards: list[Any] = [0.0] * len(envs)
        discounts: list[Any] = [1.0] * len(envs)
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
            if single:
                if (
                    type(observation) is np.ndarray
                    and observation.shape == shape
                    and observation.dtype in accepted
                ):
                    rows[env] = observation  # as _store() would, without a call for each env
                else:
                    self._store(slot, 0, env, observation)
            else:
                for column, (path, _) in enumerate(self._columns):
                    try:
                        value = specs.pick(observation, path)
                    except (KeyError, IndexError, TypeError) as error:
                        raise self._fault(
                            env,
                            f"{specs.path_name('observation', path)} is missing from the observation, whose "
                            f"structure is {tree.map_structure(type, observation)}; expected that of "
                            "observation_spec()",
                        ) from error
                    self._store(slot, column, env, value)
        self._store_results(slot, rewards, discounts, envs)
        for (path, _), array in zip(self._columns, self._buffers.observations[slot], strict=True):
            check_finite(self.name, "observation", path, array, self._first_env)
        return self._buffers.timestep()

    def _store(self, slot: int, column: int, env: int, value: Any) -> None:
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.shape == self._shapes[column] and array.dtype in self._accepted[column]:
            self._buffers.observations[slot][column][env] = array
            return
        path, leaf = self._columns[column]
        if array.shape != leaf.shape:
            raise self._fault(
                env,
                f"{specs.path_name('observation', path)} has shape {array.shape}, expected {leaf.shape} as "
                "in observation_spec(); make the two agree",
            )
        if np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            self._accepted[column].add(array.dtype)
        # Python's ints and bools have no dtype of their own to insist on.
        elif type(value) not in (int, bool) or leaf.dtype.kind not in "iuf":
            raise self._fault(
                env,
                f"{specs.path_name('observation', path)} has dtype {array.dtype}, which does not fit "
                f"{leaf.dtype} of observation_spec(); convert it in the environment",
            )
        self._buffers.observations[slot][column][env] = array

    def _store_results(self, slot: int, rewards: list, discounts: list, envs: Sequence[int]) -> None:
        rows: Any = slice(None) if len(envs) == self.num_envs else envs
        self._buffers.step_types[slot][:] = self._step_types
        for field, values, columns in (
            ("reward", rewards, self._buffers.rewards[slot]),
            ("discount", discounts, self._buffers.discounts[slot]),
        ):
            parts = self._parts[field]
            if parts is not None:
                self._store_parts(field, parts, values, columns, envs)
                continue
            try:
                columns[0][rows] = values
            except (TypeError, ValueError) as error:
                raise self._find_bad_scalar(field, values, envs) from error
            check_finite(self.name, field, (), columns[0], self._first_env)

    def _store_parts(
        self, field: str, parts: list, values: list, columns: list[np.ndarray], envs: Sequence[int]
    ) -> None:
        """Stores rewards or discounts that are nested or arrays."""
        for (path, leaf), column in zip(parts, columns, strict=True):
            for env, value in zip(envs, values, strict=True):
                if self._step_types[env] == FIRST:
                    column[env] = 0.0 if field == "reward" else 1.0
                    continue
                array = np.asarray(specs.pick(value, path))
                if array.shape != leaf.shape:
                    raise self._fault(
                        env,
                        f"{specs.path_name(field, path)} has shape {array.shape}, expected {leaf.shape} "
                        f"as in {field}_spec(); make the two agree",
                    )
                column[env] = array
            check_finite(self.name, field, path, column, self._first_env)

    def _find_bad_scalar(self, field: str, values: list, envs: Sequence[int]) -> EnvironmentFault:
        for env, value in zip(envs, values, strict=True):
            try:
                if np.shape(value) == ():
                    float(value)
                    continue
            except (TypeError, ValueError):
                pass
            return self._fault(env, f"{field} is {value!r}, expected one number; convert it with float()")
        return EnvironmentFault(f"{self.name}: the {field}s {values!r} are not one number per env.")

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
