"""The rows of an inference batch: each env owns one row of preallocated columns.

As in SEED (Espeholt et al., 2020), the server never concatenates requests. Observations are copied into the
rows that a client gets when it connects, and actions out of them. Adjacent rows form a batch without a
copy; other rows are gathered by one indexing operation per leaf:

```text
row            0    1    2    3    4    5    6    7
client         a    a    a    b    b    b    c    c
observation  [ .............................. ]      from the clients
first        [ .............................. ]      from the clients: a new episode begins here
state        [ .............................. ]      the policy's recurrent state; never leaves the server
action       [ .............................. ]      for the clients
extras       [ .............................. ]      for the clients
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tree

from framework import core, specs
from framework import nest as nests
from framework.actors.acting import copied, restarted
from framework.config_checks import whole_number
from framework.specs import path_name
from framework.types import Nest

_FIRST = np.zeros(1, np.bool_)


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


class Columns:
    """The leaves of a nest in one array `[rows, ...]` each.

    Args:
      field: name of the nest, in errors.
      names: name of each leaf.
      arrays: the array of each leaf.
      pack: makes the nest of its leaves.
    """

    def __init__(
        self, field: str, names: list[str], arrays: list[np.ndarray], pack: Callable[[Sequence], Nest]
    ):
        self._field, self._names, self._arrays, self._pack = field, names, arrays, pack

    def part(self, rows: slice) -> Columns:
        """These rows, as views."""
        return Columns(self._field, self._names, [array[rows] for array in self._arrays], self._pack)

    def write(self, rows: slice | np.ndarray, nest: Nest, count: int) -> None:
        """Copies a nest of `[count, ...]` into `rows`.

        Raises:
          ValueError: The number of leaves or a shape is wrong, or a dtype does not fit the column.
        """
        leaves = tree.flatten(nest)
        if len(leaves) != len(self._arrays):
            raise ValueError(
                f"{self._field}: got {len(leaves)} arrays, expected {len(self._arrays)} as in the first "
                "step. Use the same structure in every step."
            )
        for name, array, leaf in zip(self._names, self._arrays, leaves, strict=True):
            leaf = np.asarray(leaf)
            shape = (count, *array.shape[1:])
            fits = leaf.dtype == array.dtype or np.can_cast(leaf.dtype, array.dtype)
            if leaf.shape != shape or not fits:
                raise ValueError(
                    f"{name}: got shape {leaf.shape}, expected {shape} for {count} envs; got dtype "
                    f"{leaf.dtype}, expected {array.dtype}. There must be one row for each env."
                )
            array[rows] = leaf

    def read(self, rows: slice | np.ndarray, copies: bool = False) -> Nest:
        """Returns the nest of `rows`: views if `rows` is a slice, unless `copies`."""
        return self._pack([array[rows].copy() if copies else array[rows] for array in self._arrays])


class SlotBlock:
    """The columns of all rows, in one block of memory.

    Args:
      examples: observation, action and extras of one env, leaves `[1, ...]`.
      capacity: number of rows.
      allocate: makes the zeroed block, uint8[bytes], of a number of bytes.

    Attributes:
      observation: the columns of the observations.
      action: of the actions.
      extras: of the extras.
      first: bool[capacity].
    """

    def __init__(
        self,
        examples: tuple[Nest, Nest, Nest],
        capacity: int,
        allocate: Callable[[int], np.ndarray],
    ):
        fields = dict(zip(("observation", "action", "extras", "first"), (*examples, _FIRST), strict=True))
        leaves = {
            field: {path_name(field, path): np.asarray(leaf) for path, leaf in tree.flatten_with_path(nest)}
            for field, nest in fields.items()
        }
        every = [item for named in leaves.values() for item in named.items()]
        for name, leaf in every:
            if leaf.shape[:1] != (1,):
                raise ValueError(
                    f"{name}: got shape {leaf.shape} from the policy for 1 env, expected a leading axis of 1."
                )
        ends = np.cumsum([0, *(_aligned(capacity * leaf.nbytes) for _, leaf in every)]).tolist()
        block = allocate(ends[-1])
        arrays = iter(
            [
                block[begin : begin + capacity * leaf.nbytes]
                .view(leaf.dtype)
                .reshape(capacity, *leaf.shape[1:])
                for begin, (_, leaf) in zip(ends, every, strict=False)
            ]
        )
        self.observation, self.action, self.extras, first = (
            Columns(field, list(named), [next(arrays) for _ in named], nests.unflattener(fields[field]))
            for field, named in leaves.items()
        )
        self.first = first.read(slice(None))


def private(size: int) -> np.ndarray:
    """A block in this process's memory."""
    return np.zeros(size, np.uint8)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


class Slots:
    """Columns of `capacity` rows, and the policy that turns observations in them into actions.

    Not thread-safe: one thread acts. Clients access only rows for which no answer is pending.

    Args:
      policy: a pure step. Its owner updates the parameters.
      spec: the `EnvironmentSpec` of one env.
      capacity: number of rows: the envs of all clients together.
      allocate: see `SlotBlock`.

    Attributes:
      examples: see `SlotBlock`.
      block: the columns.
    """

    def __init__(
        self,
        policy: core.Policy,
        spec: specs.EnvironmentSpec,
        capacity: int,
        allocate: Callable[[int], np.ndarray] = private,
    ):
        self.policy = policy
        self.capacity = whole_number("capacity", capacity, 1)
        self._clients: dict[str, Rows] = {}
        # The structure of extras is known only after a step: act once, on zeros, and restore the random
        # state.
        random, observation = policy.save(), specs.zeros(spec.observations, (1,))
        action, extras, state = policy.step(observation, policy.initial_state(1))
        policy.restore(random)
        self.examples = observation, action, extras
        self.block = SlotBlock(self.examples, capacity, allocate)
        self._fresh = [copied(leaf) for leaf in tree.flatten(policy.initial_state(capacity))]
        self._state = [copied(leaf) for leaf in self._fresh]
        self._pack_state = nests.unflattener(state)

    def connect(self, name: str, envs: int, offset: int = 0, total: int | None = None) -> Rows:
        """Assigns rows to client `name`. A client that connects again, after a restart, gets the same rows.

        Args:
          name: name of the client.
          envs: number of rows.
          offset: index, among the envs of the program, of the client's first env. Policies may treat envs
            differently.
          total: number of envs of the program. None means `offset + envs`.

        Raises:
          ValueError: There are not enough free rows, or a known client asks for another number of envs.
        """
        begin = max((rows.end for rows in self._clients.values()), default=0)
        rows = self._clients.get(name, Rows(begin, begin + envs))
        if envs < 1 or rows.envs != envs:
            raise ValueError(
                f"envs: got {envs} from client {name!r}, expected {max(1, rows.envs)} as when it first "
                "connected. Use another name for a client with another number of envs."
            )
        if rows.end > self.capacity:
            raise ValueError(
                f"envs: got {envs} from client {name!r}, expected at most {self.capacity - begin}: the other "
                f"clients hold the rest of the {self.capacity} rows. Make the server with a larger capacity."
            )
        self._clients[name] = rows
        initial = tree.flatten(self.policy.initial_state(offset + envs if total is None else total))
        for fresh, state, leaf in zip(self._fresh, self._state, initial, strict=True):
            fresh[rows.slice] = leaf[offset : offset + envs]
            state[rows.slice] = leaf[offset : offset + envs]
        return rows

    def write(self, rows: Rows, observation: Nest, first: np.ndarray) -> None:
        """Writes the observations of one client into its rows."""
        self.block.observation.write(rows.slice, observation, rows.envs)
        self.block.first[rows.slice] = first

    def read(self, rows: Rows) -> tuple[Nest, Nest]:
        """Returns copies of `(action, extras)` of one client: nests of `[envs, ...]`."""
        return self.block.action.read(rows.slice, copies=True), self.block.extras.read(
            rows.slice, copies=True
        )

    def act(self, clients: Sequence[Rows], limit: int | None = None) -> list[int]:
        """Acts for the rows of `clients`, with at most `limit` rows (None: all) in one step of the policy.

        Returns:
          The number of rows of each step: one number, unless there are more than `limit` rows.
        """
        clients = sorted(clients)
        count, begin, end = sum(rows.envs for rows in clients), clients[0].begin, clients[-1].end
        limit, parts = limit or count, []
        rows = None if end - begin == count else np.concatenate([np.arange(*each) for each in clients])
        for at in range(0, count, limit):
            parts.append(min(limit, count - at))
            part = slice(begin + at, begin + at + parts[-1]) if rows is None else rows[at : at + limit]
            self._step(part, parts[-1])
        return parts

    def _step(self, rows: slice | np.ndarray, count: int) -> None:
        """Runs one step of the policy for `count` rows: a slice, or their indices."""
        state = [leaf[rows] for leaf in self._state]
        if state and self.block.first[rows].any():
            initial = [leaf[rows] for leaf in self._fresh]
            state = restarted(state, initial, self.block.first[rows])
        action, extras, after = self.policy.step(self.block.observation.read(rows), self._pack_state(state))
        self.block.action.write(rows, action, count)
        self.block.extras.write(rows, extras, count)
        # Last, because extras may be views of the state before the step, which is in these rows.
        for column, leaf in zip(self._state, tree.flatten(after), strict=True):
            column[rows] = leaf
