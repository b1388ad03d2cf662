"""Time steps of B envs: rows into which an environment writes, and the checks of what it writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.base import FIRST, LAST, MID, EnvironmentFault
from framework.environments.fields import FieldChecker, allowed, arrays
from framework.types import MultiAgentTimeStep, Nest

STEP_TYPE = specs.BoundedArray((), np.int64, FIRST, LAST)


class Row(NamedTuple):
    """One time step of B envs.

    Attributes:
      timestep: the time step, whose leaves are the arrays of `fields`.
      fields: the leaves of each field, in the order of the time step.
      exact: float64 arrays for the same rewards, before they are rounded.
    """

    timestep: Any
    fields: list[list[np.ndarray]]
    exact: list[np.ndarray]


class TimeStepRows:
    """The arrays `[time, B, ...]` of time steps, of which an environment writes row `at`.

    The owner of the rows moves `at` on, and calls `check` before it uses what they hold.

    Attributes:
      rows: by time index, one time step each.
      at: time index of the time step that is written next.
      verify: checks the leaves of each field and the exact rewards, `[n * B, ...]`; None: they are checked.
      fault: the error of a check that has failed, after which nothing of the rows may be used; else None.
      retired: whether the owner has replaced the rows, so that time steps are written into new arrays.
    """

    def __init__(
        self,
        example: Any,
        first: int,
        last: int,
        held: Mapping[str, tuple[Sequence[np.ndarray], int]] | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ):
        """Makes the rows.

        Args:
          example: a time step of B envs.
          first: time index of the first row.
          last: time index of the last row.
          held: by field, arrays that exist, one for each leaf, and the time index of their first row. The
            arrays of other fields are new.
          lock: the owner holds it while it moves rows.
        """
        length = last - first + 1

        def made(nest: Nest) -> list[np.ndarray]:
            return [np.zeros((length, *leaf.shape), leaf.dtype) for leaf in tree.flatten(nest)]

        fields = example._asdict()
        self._held = [(held or {}).get(name) or (made(nest), first) for name, nest in fields.items()]
        self._exact = [np.zeros((length, *leaf.shape)) for leaf in tree.flatten(example.reward)]
        build = nests.unflattener(example)
        self.rows: dict[int, Row] = {}
        for t in range(first, last + 1):
            leaves = [[array[t - start] for array in arrays] for arrays, start in self._held]
            timestep = build([leaf for each in leaves for leaf in each])
            self.rows[t] = Row(timestep, leaves, [array[t - first] for array in self._exact])
        self.first, self.last = first, last
        self.at = self._checked = first
        self.verify: Callable[[list[list[np.ndarray]], list[np.ndarray]], None] | None = None
        self.fault: BaseException | None = None
        self.retired = False
        self._lock = threading.Lock() if lock is None else lock

    def fits(self, example: Any) -> bool:
        """Whether time steps like this one, of arrays, can be written here."""
        mine = self.rows[self.first].timestep
        leaves = zip(tree.flatten(mine), tree.flatten(example), strict=False)
        return type(mine) is type(example) and all(
            (own.shape, own.dtype) == (other.shape, other.dtype) for own, other in leaves
        )

    def check(self) -> None:
        """Checks the rows that have been written since the last check.

        Raises:
          EnvironmentFault: The environment broke its contract. Each later call raises it, until `restart`.
        """
        with self._lock:
            first, last = self._checked, self.at
            if self.fault is not None:
                raise self.fault
            if first == last or self.verify is None:
                return
            fields = [
                [_flat(each[first - start : last - start]) for each in held] for held, start in self._held
            ]
            exact = [_flat(each[first - self.first : last - self.first]) for each in self._exact]
            try:
                self.verify(fields, exact)
            except BaseException as error:
                self.fault = error
                raise
            self._checked = last

    def advance(self) -> None:
        """Goes on at the next row, or checks all, and begins with the first again."""
        self.at += 1
        if self.at > self.last:
            self.check()
            self.move(self.first)

    def move(self, at: int) -> None:
        """Goes on at another row; those before it are forgotten."""
        self.at = self._checked = at

    def restart(self, at: int) -> None:
        """Goes on at a row after a reset of the environment."""
        self.move(at)
        self.fault = None


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:])


def time_step_spec(spec: specs.EnvironmentSpec) -> dm_env.TimeStep | MultiAgentTimeStep:
    """The specs of a whole time step of one env, with several agents of each agent's step type, too."""
    fields = (STEP_TYPE, spec.rewards, spec.discounts, spec.observations)
    if agents := specs.agents(spec):
        return MultiAgentTimeStep(*fields, dict.fromkeys(agents, STEP_TYPE))
    return dm_env.TimeStep(*fields)


class TimeStepChecker:
    """Checks the actions that go to B envs, and the time steps that they return.

    Attributes:
      action: the checker of the actions.
      fields: the checkers of a time step's fields, by name.
      exact: the rewards of the last time step in float64, `[B, ...]` per leaf.
    """

    exact: list[np.ndarray] | None = None

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
        """Makes the checkers of all fields; `make` makes one. See `FieldChecker`."""
        self._name, self._first_env, self._envs = name, first_env, range(num_envs)
        self.action = make(name, "action", spec.actions, num_envs, action_starts)
        template, starts = time_step_spec(spec), {"observation": observation_starts}
        self.fields = {
            field: make(name, field, of, num_envs, starts.get(field, ()), first_env)
            for field, of in template._asdict().items()
        }
        self._gathered = list(self.fields.values())[1:]
        self._like, self._build = specs.zeros(template, (num_envs,)), nests.unflattener(template)
        self._layout = [[(leaf.shape, leaf.dtype) for leaf in tree.flatten(nest)] for nest in self._like]
        self._rows: TimeStepRows | None = None
        # Several agents are left out: one that is not in the episode has a mask of zeros.
        self._has_mask, self._has_agents = specs.has_action_mask(spec), bool(specs.agents(spec))
        self._mask_starts = np.cumsum([0, *specs.choices(spec.actions)])[:-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rows": None}  # They belong to whoever steps the environment.

    def write_to(self, rows: TimeStepRows | None) -> None:
        """Sets the rows of the next time steps; see `BatchedEnvironment.write_to`."""
        self._rows = None
        if rows is not None and rows.fits(self._like):
            self._rows, rows.verify = rows, self.check_values

    def check_action(self, action: Nest) -> list[np.ndarray]:
        """The arrays of an action, checked."""
        try:
            return self.action(action)
        except EnvironmentFault:
            if self._rows is not None:
                self._rows.check()  # The policy may have seen NaN.
            raise

    def __call__(self, timestep: Any) -> Any:
        """Writes a time step of B envs, checks it, and returns what it wrote."""
        row = self._next_row()
        for check, field, leaves in zip(self.fields.values(), timestep._fields, row.fields, strict=True):
            check.write(getattr(timestep, field), leaves, row.exact if field == "reward" else ())
        return self._written(row)

    def gather(self, step_types: Sequence[int], *values: Sequence[Nest]) -> Any:
        """Writes a time step of B envs from the values of its fields, one for each env."""
        row = self._next_row()
        row.fields[0][0][:] = step_types
        # One agent has no step types.
        for check, of_envs, leaves in zip(self._gathered, values, row.fields[1:]):  # noqa: B905
            check.write_each(of_envs, leaves, row.exact if check is self._gathered[0] else ())
        return self._written(row)

    def _next_row(self) -> Row:
        """The row to write: of the rows of `write_to`, or of new arrays."""
        if self._rows is not None and self._rows.retired:
            self._rows = None
        if self._rows is not None:
            return self._rows.rows[self._rows.at]
        fields = [[np.empty(*leaf) for leaf in leaves] for leaves in self._layout]
        timestep = self._build([leaf for leaves in fields for leaf in leaves])
        return Row(timestep, fields, [np.empty(shape) for shape, _ in self._layout[1]])

    def _written(self, row: Row) -> Any:
        self.exact = row.exact
        if self._has_mask or self._has_agents:
            self._check_together(row.timestep)
        if self._rows is None:
            self.check_values(row.fields, row.exact)
        return row.timestep

    def check_values(self, fields: Sequence[Sequence[np.ndarray]], exact: Sequence[np.ndarray]) -> None:
        """Checks written rows: the leaves `[n * B, ...]` of each field, and the rewards in float64."""
        for check, leaves in zip(self._gathered[:3], fields[1:4], strict=True):
            check.check_values(leaves, exact if check is self._gathered[0] else ())

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
