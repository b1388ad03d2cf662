"""Items of n-step transitions, and the n-step returns of a block of time steps."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tree
from dm_env import specs as dm_specs

from framework import nest as nests
from framework.adders.block import STEPS, Block, ItemBatch, ItemFormat, transitions
from framework.adders.block_adder import BlockAdder
from framework.adders.fields import Field, is_absent, result_dtype
from framework.adders.frames import FRAMES
from framework.adders.item_writer import PriorityFns, sees_items
from framework.config_checks import whole_number
from framework.specs import path_name
from framework.types import FIRST, LAST, Nest, OneStep, Transition

_TRANSITIONS = "transitions"
_FIELDS = ("observation", "action", "reward", "discount")


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
        one_step: bool = False,
        reward_clip: float | None = None,
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
          one_step: whether the extras of an item are a `OneStep`: the first step of its window.
          reward_clip: each reward is clipped to +- this before rewards are summed; None keeps it.
        """
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount: got {discount!r}, expected a number in [0, 1].")
        if reward_clip is not None and not reward_clip > 0:
            raise ValueError(f"reward_clip: got {reward_clip!r}, expected more than 0, or None.")
        n = whole_number("n_step", n_step, 1)
        new_block = functools.partial(
            Block,
            # One row more than the longest window needs: if an episode is cut short, its last windows are
            # known one step late.
            history=n if n > 1 else 0,
            max_rows=max_in_flight_items,  # The rate limiter does not know of staged items.
            keeps_observations=sees_items(priority_fns),
            stacks=None if frame_stack is None else whole_number("frame_stack", frame_stack, 2),
        )
        super().__init__(
            client,
            NStepFormat(n, float(discount), one_step, reward_clip),
            new_block=new_block,
            priority_fns=priority_fns,
            max_in_flight_items=max_in_flight_items,
            max_delay=max_delay,
        )

    @classmethod
    def signature(cls, environment_spec: Any, extras_spec: Nest = (), one_step: bool = False) -> Transition:
        """Returns the specs of one item, for `replay.Table(signature=...)`."""
        rewards, discounts = broadcast_structures(environment_spec.rewards, environment_spec.discounts)

        def summed(spec: Any, *others: Any) -> dm_specs.Array:
            shape = np.broadcast_shapes(spec.shape, *(other.shape for other in others))
            dtype = np.result_type(*(result_dtype(each.dtype) for each in (spec, *others)))
            return dm_specs.Array(shape, dtype, name=spec.name)

        observations, extras = environment_spec.observations, () if is_absent(extras_spec) else extras_spec
        if one_step:
            reward = tree.map_structure(summed, environment_spec.rewards)
            discount = tree.map_structure(summed, environment_spec.discounts)
            extras = OneStep(reward, discount, observations, extras)
        return Transition(
            observation=observations,
            action=environment_spec.actions,
            reward=tree.map_structure(summed, rewards, discounts),
            discount=tree.map_structure(summed, discounts),
            next_observation=observations,
            extras=extras,
        )


class NStepFormat(ItemFormat):
    """The format of a `NStepTransitionAdder`, whose arguments it takes."""

    def __init__(self, n_step: int, discount: float, one_step: bool, reward_clip: float | None):
        self._n, self._g, self._one_step, self._reward_clip = n_step, discount, one_step, reward_clip

    def begin(self, block: Block) -> None:
        fields = block.fields
        observation, action, reward, discount = (fields[name].template for name in _FIELDS)
        rewards, discounts = broadcast_structures(reward, discount)
        self.sum_over(block)
        extras = fields["extras"].template if "extras" in fields else ()
        if self._one_step:
            extras = OneStep(reward, discount, observation, extras)
        self._pack = nests.unflattener(
            Transition(observation, action, rewards, discounts, observation, extras)
        )

    def sum_over(self, block: Block) -> None:
        """Takes the arrays of rewards and discounts, which change if the block grows."""
        reward, discount = block.fields["reward"], block.fields["discount"]
        rewards, _ = broadcast_structures(reward.template, discount.template)
        try:
            self._returns = Returns(rewards, reward, discount, self._n, self._g)
        except ValueError as error:
            raise ValueError(f"reward and discount: expected shapes that broadcast. {error}") from error

    def emit(self, block: Block, end: int) -> ItemBatch | Sequence[ItemBatch]:
        windows = self.windows(block, end)
        return ItemBatch() if windows is None else self.items(block, *windows)

    def windows(self, block: Block, end: int) -> tuple[np.ndarray, np.ndarray, Sequence[np.ndarray]] | None:
        """Appends the rows up to `end`; returns the windows that they complete, as `items` takes them."""
        history, width = block.history, block.num_envs
        # Rows up to `end`: the newest items end at the newest observation.
        if block.frames is None:
            rows = block.rows
            first = history + int(rows[history, -1] >= 0)
            columns = block.fields["observation"].take(slice(first * width, (end + 1) * width))
            rows[first : end + 1] = block.writer.append(STEPS, columns).reshape(-1, width)
        if (limit := self._reward_clip) is not None:
            for rewards in block.fields["reward"].arrays:
                np.clip(rewards[history:end], -limit, limit, out=rewards[history:end])
        return self._returns.windows(block.step_types[: end + 1], history)

    def items(
        self,
        block: Block,
        start: np.ndarray,
        stop: np.ndarray,
        sums: Sequence[np.ndarray],
        others: Mapping[str, tuple[str, np.ndarray]] | None = None,
    ) -> ItemBatch:
        """Returns the items of k windows.

        Args:
          block: holds the rows, which are appended.
          start: int64 `[k]`, the row of the first action, as a flat index `time * B + env`.
          stop: int64 `[k]`, the row after the last action.
          sums: one `[k, ...]` per column, discounted sums of rewards, then products of discounts.
          others: for columns of the observations that are another one, of other rows: its name, and the rows.
        """
        width, writer, fields, others = block.num_envs, block.writer, block.fields, others or {}
        observation = fields["observation"]
        stream, rows = (STEPS, block.rows) if block.frames is None else (FRAMES, block.frames.rows)
        flat = rows.reshape(-1, *rows.shape[2:])
        columns = fields["action"].take(start)
        columns.update(zip(self._returns.names, sums, strict=True))
        observations, num_before_next = [start, stop], len(columns)
        if self._one_step:
            observations.append(start + width)
            for name in ("reward", "discount"):
                values = fields[name].take(start)
                columns.update({f"one_step/{column}": value for column, value in values.items()})
        num_before_extras = len(columns)
        if "extras" in fields:
            columns.update(fields["extras"].take(start))
        own = writer.append(_TRANSITIONS, columns)
        block.release(_TRANSITIONS, own)

        def pack(observations: Iterable[Iterable[Any]], stored: list[Any]) -> Nest:
            before, after, *first = observations
            one_step = stored[num_before_next:num_before_extras]
            parts = (before, stored[:num_before_next], after, one_step, *first, stored[num_before_extras:])
            return self._pack([leaf for part in parts for leaf in part])

        def data() -> Nest:
            replaced = {name: observation.take(at)[other] for name, (other, at) in others.items()}
            taken = [{**observation.take(index), **replaced}.values() for index in observations]
            return pack(taken, [value.copy() for value in columns.values()])

        stored = [writer.slice(_TRANSITIONS, name, own) for name in columns]
        replaced = {name: writer.slice(stream, other, flat[at]) for name, (other, at) in others.items()}
        seen = []
        for rows in [flat[index] for index in observations]:  # Leaves with the same rows share the array.
            slices = {name: writer.slice(stream, name, rows) for name in observation.names}
            seen.append({**slices, **replaced}.values())
        return ItemBatch(len(own), pack(seen, stored), data)


class Returns:
    """Sums rewards and multiplies discounts over windows; see `NStepTransitionAdder` for the formula.

    Rewards and discounts come in pairs, one per leaf of the larger nest. The two leaves of a pair broadcast.

    Attributes:
      names: columns of the sums of rewards, then of the products of discounts.
    """

    def __init__(self, template: Nest, reward: Field, discount: Field, n_step: int, g: float):
        """Prepares the sums.

        Args:
          template: a nest with the structure of the sums.
          reward: the staged rewards `[time, B, ...]`.
          discount: the staged discounts `[time, B, ...]`.
          n_step: the largest number of steps in a window.
          g: the agent's discount.
        """
        paths = [path for path, _ in tree.flatten_with_path(template)]
        self.names = [path_name(field, path) for field in ("reward", "discount") for path in paths]
        self._n = n_step
        # A single array goes with each leaf of the other field.
        given = reward.arrays, discount.arrays
        pairs = [[arrays[i % len(arrays)] for arrays in given] for i in range(len(paths))]
        shapes = [np.broadcast_shapes(r.shape[2:], d.shape[2:]) for r, d in pairs]
        # Views whose axes after [time, B] line up; rewards have the shape of the sums.
        self._rewards = [
            np.broadcast_to(_with_axes(r, len(shape)), (*r.shape[:2], *shape))
            for (r, _), shape in zip(pairs, shapes, strict=True)
        ]
        self._discounts = [_with_axes(d, len(shape)) for (_, d), shape in zip(pairs, shapes, strict=True)]
        # The items hold one reward, then one discount.
        self._shapes = [*shapes, *(d.shape[2:] for _, d in pairs)]
        self._dtypes = [np.result_type(r.dtype, d.dtype) for r, d in pairs]  # of the sums
        # In the dtype of the environment's discount: float32 rewards stay float32.
        self._g = [d.dtype.type(g) for _, d in pairs]

    def windows(
        self, kinds: np.ndarray, history: int
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]] | None:
        """Returns the windows that rows `[history, t)` complete, by time, then env, then the longest first.

        A transition completes its longest window. The shorter ones are items too if no longer one exists
        (the first steps of an episode) or if the episode ends there.

        Args:
          kinds: int8 `[t + 1, B]` step types of the rows, -1 where there is no row.
          history: number of rows at the front whose windows earlier calls returned.

        Returns:
          None if there is no window, or: int64 `[k]`, the row of the first action, as a flat index
          `time * B + env`; int64 `[k]`, the row after the last action; and one `[k, ...]` per column,
          discounted sums of rewards, then products of discounts.
        """
        real = transitions(kinds)
        n, width = self._n, kinds.shape[1]
        # An episode that is cut short is known one row late: when the row after its closing row is FIRST. Its
        # last transition may be the one before the block.
        begin = history - int(n > 1)
        end = len(real)
        alive = real[begin:]
        new = alive if n == 1 else alive & (np.arange(len(alive)) > 0)[:, None]
        is_last, is_cut = kinds[begin + 1 :] == LAST, np.zeros(alive.shape, np.bool_)
        if n > 1:
            is_cut[:-1] = (kinds[begin + 2 :] == FIRST) & ~is_last[:-1]
        rewards = [
            r[begin:end].astype(dtype, copy=False)
            for r, dtype in zip(self._rewards, self._dtypes, strict=True)
        ]
        discounts = [d[begin:end] for d in self._discounts]
        parts = []
        for length in range(1, n + 1):
            wanted = new & alive
            late = longer = np.zeros_like(alive)
            if length < n:
                longer = alive & real[begin - length : end - length]
                late = longer & is_cut
                wanted = (wanted & (is_last | ~longer)) | late
            cell = np.flatnonzero(wanted)
            if len(cell):
                sums = zip([*rewards, *discounts], self._shapes, strict=True)
                parts.append(
                    (
                        np.full(len(cell), length),
                        cell,
                        cell + width * late.reshape(-1)[cell],  # when the window is an item
                        *[array.reshape(-1, *shape)[cell] for array, shape in sums],
                    )
                )
            if not np.count_nonzero(longer):
                break
            # Backwards in time: R <- r + g d R and D <- g d D. Cells without a longer window are not read.
            earlier = slice(begin - length, end - length)
            factors = [d[earlier] * g for d, g in zip(self._discounts, self._g, strict=True)]
            rewards = [r[earlier] + f * s for r, f, s in zip(self._rewards, factors, rewards, strict=True)]
            discounts = [f * p for f, p in zip(factors, discounts, strict=True)]
            alive = longer
        if not parts:
            return None
        lengths, cells, times, *columns = [np.concatenate(part) for part in zip(*parts, strict=True)]
        if n > 1:
            order = np.lexsort((-lengths, times))
            lengths, cells, columns = lengths[order], cells[order], [column[order] for column in columns]
        ends = cells + (begin + 1) * width
        return ends - lengths * width, ends, columns


def _with_axes(array: np.ndarray, dims: int) -> np.ndarray:
    """Returns `array` `[time, B, ...]` with `dims` axes after the first two, new axes first."""
    return array.reshape(*array.shape[:2], *(1,) * (dims - array.ndim + 2), *array.shape[2:])


def broadcast_structures(rewards: Nest, discounts: Nest) -> tuple[Nest, Nest]:
    """Returns both in one structure: a single leaf is repeated for each leaf of the other nest.

    Raises:
      ValueError: Both are nests and their structures differ.
    """
    if not tree.is_nested(rewards) and tree.is_nested(discounts):
        return tree.map_structure(lambda _: rewards, discounts), discounts
    if tree.is_nested(rewards) and not tree.is_nested(discounts):
        return rewards, tree.map_structure(lambda _: discounts, rewards)
    try:
        tree.assert_same_structure(rewards, discounts)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"reward and discount: got the structures {rewards!r} and {discounts!r}, expected the same "
            "structure, or a single array for one of them."
        ) from error
    return rewards, discounts
