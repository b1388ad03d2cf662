"""B environments stepped one after the other in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

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
from framework.environments.lanes import Lane
from framework.types import Nest


class InlineEnvironment(BatchedEnvironment):
    """Steps each lane in turn and writes the results into buffers that are made once."""

    can_step_lanes = True
    can_end_episodes = True

    def __init__(
        self,
        name: str,
        make_lanes: Sequence[Callable[[], Lane]],
        *,
        first_lane: int = 0,
        allocate: Callable[..., np.ndarray] | None = None,
    ):
        """Builds the lanes.

        Args:
          name: for errors.
          make_lanes: one function per lane.
          first_lane: the number by which errors call lane 0 (a process has only some of all lanes).
          allocate: makes the buffers' arrays, see ``Buffers``.
        """
        self.name = name
        self.num_lanes = len(make_lanes)
        self._first_lane = first_lane
        self._lanes: list[Lane] = []
        try:
            for index, make in enumerate(make_lanes):
                self._lanes.append(make())
                if self._lanes[index].spec != self._lanes[0].spec:
                    raise EnvironmentFault(
                        f"{name}, lane {first_lane + index}: its spec is {self._lanes[index].spec}, but lane "
                        f"{first_lane}'s is {self._lanes[0].spec}; all lanes must be alike."
                    )
        except BaseException:
            self.close()
            raise
        self.spec = self._lanes[0].spec
        self._check_action = ActionChecker(name, self.spec.actions, self.num_lanes)
        self._discrete = [
            leaf.shape == () and leaf.dtype.kind in "iu" for _, leaf in specs.leaves(self.spec.actions)
        ]
        self._build_action = specs.unflattener(self.spec.actions)
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
        self._buffers = Buffers(self.spec, self.num_lanes, allocate)
        self._step_types = [LAST] * self.num_lanes  # LAST: the next step starts an episode

    def observation_spec(self) -> Nest:
        return self.spec.observations

    def action_spec(self) -> Nest:
        return self.spec.actions

    def reward_spec(self) -> Nest:
        return self.spec.rewards

    def discount_spec(self) -> Nest:
        return self.spec.discounts

    def reset(self) -> dm_env.TimeStep:
        self._step_types = [LAST] * self.num_lanes
        slot = self._buffers.flip()
        return self._advance(slot, [None] * self.num_lanes, range(self.num_lanes))

    def step(self, action: Nest) -> dm_env.TimeStep:
        actions = self._split(action)
        return self._advance(self._buffers.flip(), actions, range(self.num_lanes))

    def step_lanes(self, action: Nest, active: np.ndarray) -> dm_env.TimeStep:
        actions = self._split(action)
        # In place: the other lanes' values stay where they are.
        return self._advance(self._buffers.current, actions, np.nonzero(active)[0].tolist())

    def end_episodes(self, lanes: np.ndarray) -> None:
        for lane in np.nonzero(lanes)[0]:
            self._step_types[lane] = LAST

    def _split(self, action: Nest) -> list[Nest]:
        """The action of each lane. Copied, since environments may keep it and policies may reuse theirs."""
        arrays = self._check_action(action)
        if self._single_action and self._discrete[0]:
            return arrays[0].tolist()
        per_leaf: list[Sequence[Any]] = [
            array.tolist() if discrete else list(array.copy())
            for array, discrete in zip(arrays, self._discrete, strict=True)
        ]
        if self._single_action:
            return list(per_leaf[0])
        return [self._build_action([leaf[lane] for leaf in per_leaf]) for lane in range(self.num_lanes)]

    def _advance(self, slot: int, actions: Sequence[Nest], lanes: Sequence[int]) -> dm_env.TimeStep:
        step_types = self._step_types
        single = self._single_observation
        if single:
            rows, shape, accepted = self._buffers.observations[slot][0], self._shapes[0], self._accepted[0]
        rewards: list[Any] = [0.0] * len(lanes)
        discounts: list[Any] = [1.0] * len(lanes)
        for index, lane in enumerate(lanes):
            environment = self._lanes[lane]
            try:
                if step_types[lane] == LAST:
                    observation = environment.reset()
                    step_types[lane] = FIRST
                else:
                    observation, rewards[index], discounts[index], step_types[lane] = environment.step(
                        actions[lane]
                    )
            except Exception as error:
                call = "reset()" if step_types[lane] == LAST else f"step({actions[lane]!r})"
                raise self._fault(lane, f"{call} raised {type(error).__name__}: {error}") from error
            if single:
                if (
                    type(observation) is np.ndarray
                    and observation.shape == shape
                    and observation.dtype in accepted
                ):
                    rows[lane] = observation  # as _store() would, without a call for each lane
                else:
                    self._store(slot, 0, lane, observation)
            else:
                for column, (path, _) in enumerate(self._columns):
                    try:
                        value = specs.pick(observation, path)
                    except (KeyError, IndexError, TypeError) as error:
                        raise self._fault(
                            lane,
                            f"{specs.path_name('observation', path)} is missing from the observation, whose "
                            f"structure is {tree.map_structure(type, observation)}; expected that of "
                            "observation_spec()",
                        ) from error
                    self._store(slot, column, lane, value)
        self._store_results(slot, rewards, discounts, lanes)
        for (path, _), array in zip(self._columns, self._buffers.observations[slot], strict=True):
            check_finite(self.name, "observation", path, array, self._first_lane)
        return self._buffers.timestep()

    def _store(self, slot: int, column: int, lane: int, value: Any) -> None:
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.shape == self._shapes[column] and array.dtype in self._accepted[column]:
            self._buffers.observations[slot][column][lane] = array
            return
        path, leaf = self._columns[column]
        if array.shape != leaf.shape:
            raise self._fault(
                lane,
                f"{specs.path_name('observation', path)} has shape {array.shape}, expected {leaf.shape} as "
                "in observation_spec(); make the two agree",
            )
        if np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            self._accepted[column].add(array.dtype)
        # Python's ints and bools have no dtype of their own to insist on.
        elif type(value) not in (int, bool) or leaf.dtype.kind not in "iuf":
            raise self._fault(
                lane,
                f"{specs.path_name('observation', path)} has dtype {array.dtype}, which does not fit "
                f"{leaf.dtype} of observation_spec(); convert it in the environment",
            )
        self._buffers.observations[slot][column][lane] = array

    def _store_results(self, slot: int, rewards: list, discounts: list, lanes: Sequence[int]) -> None:
        rows: Any = slice(None) if len(lanes) == self.num_lanes else lanes
        self._buffers.step_types[slot][:] = self._step_types
        for field, values, columns in (
            ("reward", rewards, self._buffers.rewards[slot]),
            ("discount", discounts, self._buffers.discounts[slot]),
        ):
            parts = self._parts[field]
            if parts is not None:
                self._store_parts(field, parts, values, columns, lanes)
                continue
            try:
                columns[0][rows] = values
            except (TypeError, ValueError) as error:
                raise self._find_bad_scalar(field, values, lanes) from error
            check_finite(self.name, field, (), columns[0], self._first_lane)

    def _store_parts(
        self, field: str, parts: list, values: list, columns: list[np.ndarray], lanes: Sequence[int]
    ) -> None:
        """Stores rewards or discounts that are nested or arrays."""
        for (path, leaf), column in zip(parts, columns, strict=True):
            for lane, value in zip(lanes, values, strict=True):
                if self._step_types[lane] == FIRST:
                    column[lane] = 0.0 if field == "reward" else 1.0
                    continue
                array = np.asarray(specs.pick(value, path))
                if array.shape != leaf.shape:
                    raise self._fault(
                        lane,
                        f"{specs.path_name(field, path)} has shape {array.shape}, expected {leaf.shape} "
                        f"as in {field}_spec(); make the two agree",
                    )
                column[lane] = array
            check_finite(self.name, field, path, column, self._first_lane)

    def _find_bad_scalar(self, field: str, values: list, lanes: Sequence[int]) -> EnvironmentFault:
        for lane, value in zip(lanes, values, strict=True):
            try:
                if np.shape(value) == ():
                    float(value)
                    continue
            except (TypeError, ValueError):
                pass
            return self._fault(lane, f"{field} is {value!r}, expected one number; convert it with float()")
        return EnvironmentFault(f"{self.name}: the {field}s {values!r} are not one number per lane.")

    def _fault(self, lane: int, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self.name}, lane {self._first_lane + lane}: {what}.")

    def render(self, lane: int = 0) -> np.ndarray:
        picture = self._lanes[lane].render()
        if not isinstance(picture, np.ndarray):
            raise NotImplementedError(
                f"{self.name}: render() gave {type(picture).__name__}, expected an array; make the "
                "environment with render_mode='rgb_array'."
            )
        return picture

    def close(self) -> None:
        """Closes every lane, also if some fail; the first failure is raised at the end."""
        first_error: Exception | None = None
        while self._lanes:
            try:
                self._lanes.pop().close()
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
