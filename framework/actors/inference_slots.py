"""The rows of an inference batch: each env owns one row of preallocated columns.

As in SEED (Espeholt et al., 2020), the server never concatenates requests. A client writes observations into
the rows that it gets when it connects, and reads its actions there. Adjacent rows form a batch without a
copy; other rows are gathered by one indexing operation per leaf:

```text
row            0    1    2    3    4    5    6    7
client         a    a    a    b    b    b    c    c
observation  [ .............................. ]      written by the clients
first        [ .............................. ]      written by the clients: a new episode begins here
state        [ .............................. ]      the policy's recurrent state; never leaves the server
action       [ .............................. ]      written by the server
extras       [ .............................. ]      written by the server
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from framework import core, specs
from framework import nest as nests
from framework.actors.recurrent_state import restart_envs
from framework.types import Nest

Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]


class Rows(NamedTuple):
    """The rows `[begin, end)` of one client."""

    begin: int
    end: int

    @property
    def slice(self) -> slice:
        return slice(self.begin, self.end)

    @property
    def envs(self) -> int:
        return self.end - self.begin


class Slots:
    """Columns of `capacity` rows, and the policy that turns observations in them into actions.

    Not thread-safe: one thread acts. Clients access only rows for which no answer is pending.

    Args:
      policy: a pure step. Its owner updates the parameters.
      spec: the `EnvironmentSpec` of one env.
      capacity: number of rows: the envs of all clients together.
      allocate: `(name, shape, dtype)` to a zeroed array. None allocates private memory.
    """

    def __init__(
        self,
        policy: core.Policy,
        spec: specs.EnvironmentSpec,
        capacity: int,
        allocate: Allocate | None = None,
    ):
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}, expected at least 1 env.")
        allocate = allocate or (lambda name, shape, dtype: np.zeros(shape, dtype))
        self.policy = policy
        self.capacity = capacity
        self._clients: dict[str, Rows] = {}
        self._paths = [path for path, _ in specs.leaves(spec.observations)]
        self.observations = [
            allocate(specs.path_name("observation", path), (capacity, *leaf.shape), leaf.dtype)
            for path, leaf in specs.leaves(spec.observations)
        ]
        self.first = allocate("first", (capacity,), np.dtype(np.bool_))
        self._build_observation = nests.unflattener(spec.observations)
        # The structure of extras is known only after a step: act once, on zeros, and restore the random
        # state.
        random = policy.save()
        action, extras, state = policy.step(specs.zeros(spec.observations, (1,)), policy.initial_state(1))
        policy.restore(random)
        self.action_nest, self.extras_nest = _numbered(action), _numbered(extras)
        self.actions = _columns("action", action, capacity, allocate)
        self.extras = _columns("extras", extras, capacity, allocate)
        fresh = tree.flatten(policy.initial_state(capacity))
        self._state_nest = _numbered(state)
        self._fresh = [_empty_like(leaf, capacity) for leaf in fresh]
        self._state = [_empty_like(leaf, capacity) for leaf in fresh]

    def connect(self, name: str, envs: int, offset: int = 0, total: int | None = None) -> Rows:
        """Assigns rows to client `name`. A client that connects again, after a restart, gets the same rows.

        Args:
          name: name of the client.
          envs: number of rows.
          offset: index, among the envs of its actor, of the client's first env. Policies may treat envs
            differently.
          total: number of envs of its actor. None is `envs`.

        Raises:
          ValueError: There are not enough free rows, or a known client asks for another number of envs.
        """
        if envs < 1:
            raise ValueError(f"envs: got {envs} from client {name!r}, expected at least 1.")
        rows = self._clients.get(name)
        if rows is not None and rows.envs != envs:
            raise ValueError(
                f"envs: got {envs} from client {name!r}, expected {rows.envs} as when it first connected. "
                "Use another name for a client with another number of envs."
            )
        if rows is None:
            begin = max((rows.end for rows in self._clients.values()), default=0)
            if begin + envs > self.capacity:
                raise ValueError(
                    f"envs: got {envs} from client {name!r}, expected at most {self.capacity - begin}: the "
                    f"other clients hold the rest of the {self.capacity} rows. Make the server with a larger "
                    "capacity."
                )
            rows = self._clients[name] = Rows(begin, begin + envs)
        initial = tree.flatten(self.policy.initial_state(offset + envs if total is None else total))
        for fresh, state, leaf in zip(self._fresh, self._state, initial, strict=True):
            fresh[rows.slice] = leaf[offset : offset + envs]
            state[rows.slice] = leaf[offset : offset + envs]
        return rows

    def write(self, rows: Rows, observation: Nest, first: np.ndarray) -> None:
        """Writes the observations of one client into its rows."""
        write_observation(self.observations, self._paths, rows.slice, observation)
        self.first[rows.slice] = first

    def read(self, rows: Rows) -> tuple[Nest, Nest]:
        """Copies of `(action, extras)` of one client: nests of `[envs, ...]`."""
        actions = [column[rows.slice].copy() for column in self.actions]
        extras = [column[rows.slice].copy() for column in self.extras]
        return build_nest(self.action_nest, actions), build_nest(self.extras_nest, extras)

    def act(self, clients: Sequence[Rows], limit: int | None = None) -> list[int]:
        """Acts for the rows of `clients`, with at most `limit` rows (None: all) in one step of the policy.

        Returns:
          The number of rows of each step: one number, unless there are more than `limit` rows.
        """
        rows, count = _join(clients)
        if limit is None or count <= limit:
            self._step(rows, count)
            return [count]
        sizes = [min(limit, count - begin) for begin in range(0, count, limit)]
        for index, size in enumerate(sizes):
            begin = index * limit
            if isinstance(rows, slice):
                self._step(slice(rows.start + begin, rows.start + begin + size), size)
            else:
                self._step(rows[begin : begin + size], size)
        return sizes

    def _step(self, rows: Any, count: int) -> None:
        """One step of the policy for `count` rows: a slice, or their indices."""
        observation = self._build_observation([column[rows] for column in self.observations])
        state = [leaf[rows] for leaf in self._state]
        if state and self.first[rows].any():
            initial = [leaf[rows] for leaf in self._fresh]
            state = restart_envs(state, initial, np.flatnonzero(self.first[rows]))
        action, extras, after = self.policy.step(observation, build_nest(self._state_nest, state))
        self._store("action", self.actions, action, rows, count)
        self._store("extras", self.extras, extras, rows, count)
        # Last, because extras may be views of the state before the step, which is in these rows.
        for column, leaf in zip(self._state, tree.flatten(after), strict=True):
            column[rows] = leaf

    def _store(self, field: str, columns: list[np.ndarray], nest: Nest, rows: Any, count: int) -> None:
        leaves = [nest] if isinstance(nest, np.ndarray) else tree.flatten(nest)
        if len(leaves) != len(columns):
            raise ValueError(
                f"{field}: got {len(leaves)} arrays from the policy, expected {len(columns)} as at its first "
                "step. Return the same structure at every step."
            )
        for column, leaf in zip(columns, leaves, strict=True):
            leaf = np.asarray(leaf)
            if leaf.shape != (count, *column.shape[1:]) or leaf.dtype != column.dtype:
                raise ValueError(
                    f"{field}: got shape {leaf.shape} and dtype {leaf.dtype} from the policy for {count} "
                    f"envs, expected {(count, *column.shape[1:])} and {column.dtype}. Return one row per env."
                )
            column[rows] = leaf


def write_observation(
    columns: Sequence[np.ndarray], paths: Sequence[specs.Path], rows: Any, observation: Nest
) -> None:
    """Copies a nest of `[envs, ...]` into `rows` of one column per leaf."""
    for column, path in zip(columns, paths, strict=True):
        leaf = specs.pick(observation, path) if path else observation
        into = column[rows]
        if np.shape(leaf) != into.shape:
            raise ValueError(
                f"{specs.path_name('observation', path)}: got shape {np.shape(leaf)}, expected {into.shape}, "
                "one row for each env of the client."
            )
        np.copyto(into, leaf, casting="same_kind")


def build_nest(numbered: Nest, leaves: Sequence[Any]) -> Nest:
    """A nest like `numbered`, whose leaves are indices, with `leaves` in place of the indices."""
    if isinstance(numbered, int):
        return leaves[numbered]
    return tree.map_structure(lambda index: leaves[index], numbered)


def _numbered(nest: Nest) -> Nest:
    """The same structure with leaf i replaced by i: small and without arrays, for messages."""
    return tree.unflatten_as(nest, list(range(len(tree.flatten(nest)))))


def _columns(field: str, nest: Nest, capacity: int, allocate: Allocate) -> list[np.ndarray]:
    columns = []
    for index, leaf in enumerate(tree.flatten(nest)):
        leaf = np.asarray(leaf)
        if leaf.ndim == 0 or leaf.shape[0] != 1:
            raise ValueError(
                f"{field}: got shape {leaf.shape} from the policy for 1 env, expected a leading axis of 1."
            )
        columns.append(allocate(f"{field}/{index}", (capacity, *leaf.shape[1:]), leaf.dtype))
    return columns


def _empty_like(leaf: Any, capacity: int) -> Any:
    """Zeros `[capacity, ...]` of a leaf's kind: numpy, or torch on its device."""
    shape = (capacity, *leaf.shape[1:])
    return leaf.new_zeros(shape) if hasattr(leaf, "new_zeros") else np.zeros(shape, leaf.dtype)


def _join(clients: Sequence[Rows]) -> tuple[Any, int]:
    """One index for the rows of all clients: a slice where they are next to each other."""
    ordered = sorted(clients)
    count = sum(rows.envs for rows in ordered)
    if ordered[-1].end - ordered[0].begin == count:
        return slice(ordered[0].begin, ordered[-1].end), count
    return np.concatenate([np.arange(rows.begin, rows.end) for rows in ordered]), count
