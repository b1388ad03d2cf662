"""Items of n-step transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree
from dm_env import specs as dm_specs

from framework.adders.block import BlockAdder, PriorityFns
from framework.adders.fields import is_absent, result_dtype
from framework.adders.observations import ObservationRows, StackedRows
from framework.adders.returns import Returns, Windows, broadcast_structures
from framework.types import FIRST, Nest, Transition

_TRANSITIONS = "transitions"


class NStepTransitionAdder(BlockAdder):
    """Writes `Transition` items over windows of up to n steps.

    For a window of n' steps that starts at t, let g be the agent's discount, and let d_i and r_i be the
    environment's discount and reward for the i-th action of the window:

    ```text
    reward   = sum_i  g^i (d_0 ... d_{i-1}) r_i
    discount = g^(n'-1) d_0 ... d_{n'-1}
    ```

    The discount has one factor g fewer than the window has steps. The learner multiplies by g once more:
    `target = reward + g * discount * value(next_observation)` for every n'.

    The adder writes one item per step as soon as an episode has n steps. It also writes shorter windows:
    those that start at the first observation (s_0 -> s_1, ..., s_0 -> s_{n-1}) and those that end at the last
    one (s_{T-n+1} -> s_T, ..., s_{T-1} -> s_T). An episode of T steps gives T + n - 1 items, or 2T - 1 if T <
    n:

    ```text
    n = 3, T = 4:    0->1  0->2  0->3  1->4  2->4  3->4
    ```

    Rewards and discounts may be arrays or nests. If one of them is a single array and the other a nest, the
    array is used for each leaf of the nest. Leaves broadcast as numpy arrays do, and `reward` has the
    broadcast shape. An episode that is cut short by a FIRST step ends like a truncated one.

    An observation is stored once, whatever the number of items that refer to it.
    """

    def __init__(
        self,
        client: Any,
        n_step: int,
        discount: float,
        *,
        priority_fns: PriorityFns | None = None,
        max_in_flight_items: int | None = None,
        max_delay: float = 0.05,
        frame_stack: int | None = None,
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          n_step: the largest number of steps in a window; at least 1.
          discount: the agent's discount g, in [0, 1].
          priority_fns: `{table: fn or None}`; each item goes to each table. `fn` takes a `Transition` of k
            items (leaves `[k, ...]`) and returns k priorities. None means the largest priority so far.
          max_in_flight_items: number of items that may wait for room in a table before `add` waits too. It
            is also roughly the number of steps that are staged before they are written. None means 512.
          max_delay: seconds; see `BlockAdder`.
          frame_stack: number k of frames in an observation `[k, ...]`, oldest first. Each frame is stored
            once instead of k times; readers get the same items. None stores observations as they are.
        """
        if frame_stack is not None and (frame_stack != int(frame_stack) or frame_stack < 2):
            raise ValueError(
                f"frame_stack: got {frame_stack!r}, expected a whole number of at least 2, or None."
            )
        if n_step != int(n_step) or n_step < 1:
            raise ValueError(f"n_step: got {n_step!r}, expected a whole number of at least 1.")
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount: got {discount!r}, expected a number in [0, 1].")
        self._n = int(n_step)
        self._g = float(discount)
        # One row more than the longest window needs: if an episode is cut short, its last windows are known
        # one step late.
        history = self._n if self._n > 1 else 0
        self._frame_stack = frame_stack
        super().__init__(
            client,
            history,
            priority_fns,
            max_in_flight_items=max_in_flight_items,
            max_delay=max_delay,
            max_staged=max_in_flight_items,  # staged items have not passed the rate limiter either
        )

    @classmethod
    def signature(cls, environment_spec: Any, extras_spec: Nest = ()) -> Transition:
        """Returns the specs of one item, for `replay.Table(signature=...)`."""
        rewards, discounts = broadcast_structures(environment_spec.rewards, environment_spec.discounts)

        def reward_spec(reward: Any, discount: Any) -> dm_specs.Array:
            shape = np.broadcast_shapes(reward.shape, discount.shape)
            dtype = np.result_type(result_dtype(reward.dtype), result_dtype(discount.dtype))
            return dm_specs.Array(shape, dtype, name=reward.name)

        def discount_spec(discount: Any) -> dm_specs.Array:
            return dm_specs.Array(discount.shape, result_dtype(discount.dtype), name=discount.name)

        return Transition(
            observation=environment_spec.observations,
            action=environment_spec.actions,
            reward=tree.map_structure(reward_spec, rewards, discounts),
            discount=tree.map_structure(discount_spec, discounts),
            next_observation=environment_spec.observations,
            extras=() if is_absent(extras_spec) else extras_spec,
        )

    def _begin(self) -> None:
        assert self._observation is not None
        made_of = (self._writer, self._release, self._observation, self._kinds, self._history, self._skip)
        if self._frame_stack is None:
            self._rows: ObservationRows = ObservationRows(*made_of)
            return
        for name, array in zip(self._observation.names, self._observation.arrays, strict=True):
            if array.shape[2:3] != (self._frame_stack,):
                raise ValueError(
                    f"frame_stack: got {self._frame_stack} and {name} of shape {array.shape[2:]}, expected "
                    "that many frames along the first axis of each observation."
                )
        self._rows = StackedRows(*made_of)

    def _declare(self, action: Nest, timestep: Any, extras: Nest) -> None:
        broadcast_structures(timestep.reward, timestep.discount)
        super()._declare(action, timestep, extras)
        assert self._reward is not None and self._discount is not None
        self._returns = Returns(self._reward, self._discount, self._n, self._g)

    def _advance(self, kind: Any) -> None:
        if isinstance(self._rows, StackedRows):
            self._rows.check(self._t + 1, np.equal(kind, FIRST))
        super()._advance(kind)

    def _shift(self, by: int) -> None:
        self._rows.shift(by)

    def _forget(self) -> None:
        self._rows.forget()

    def _emit(self, t: int) -> None:
        self._rows.append(t)
        windows = self._returns.windows(self._kinds[: t + 1], self._history)
        if windows is not None:
            self._write(windows)

    def _write(self, windows: Windows) -> None:
        assert self._observation is not None and self._action is not None
        columns = dict(zip(self._action.names, self._action.take(windows.start), strict=True))
        columns.update(zip(self._returns.reward_names, windows.rewards, strict=True))
        columns.update(zip(self._returns.discount_names, windows.discounts, strict=True))
        if self._extras is not None:
            columns.update(zip(self._extras.names, self._extras.take(windows.start), strict=True))
        own = self._writer.append(_TRANSITIONS, columns)
        first, last = self._rows.at(windows.start), self._rows.at(windows.end)
        writer, names = self._writer, self._observation.names
        trajectory = self._transition(
            [writer.slice(self._rows.stream, name, first) for name in names],
            [writer.slice(self._rows.stream, name, last) for name in names],
            {name: writer.slice(_TRANSITIONS, name, own) for name in columns},
        )

        def data() -> Transition:
            assert self._observation is not None
            return self._transition(
                self._observation.take(windows.start),
                self._observation.take(windows.end),
                {name: value.copy() for name, value in columns.items()},
            )

        self._write_items(trajectory, len(own), data)
        self._release(_TRANSITIONS, own)

    def _transition(self, before: list[Any], after: list[Any], columns: dict[str, Any]) -> Transition:
        """Returns the nest of leaves: observations in the order of their names, the rest by column."""
        assert self._observation is not None and self._action is not None
        returns, extras = self._returns, self._extras
        return Transition(
            observation=self._observation.nest(before),
            action=self._action.nest([columns[name] for name in self._action.names]),
            reward=returns.nest([columns[name] for name in returns.reward_names]),
            discount=returns.nest([columns[name] for name in returns.discount_names]),
            next_observation=self._observation.nest(after),
            extras=() if extras is None else extras.nest([columns[name] for name in extras.names]),
        )
