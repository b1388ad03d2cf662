"""Items of n-step transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree
from dm_env import specs as dm_specs

from framework.adders.block import FIRST, LAST, BlockAdder, PriorityFns
from framework.adders.fields import Field, column_name, is_absent, result_dtype
from framework.adders.observations import ObservationRows, StackedRows
from framework.types import Nest, Transition

_TRANSITIONS = "transitions"


class NStepTransitionAdder(BlockAdder):
    """Writes ``Transition`` items over windows of up to n steps.

    For a window of n' steps that starts at t, with g the agent's discount and d_i, r_i what the environment
    answered to the i-th action of the window::

        reward   = sum_i  g^i (d_0 ... d_{i-1}) r_i
        discount = g^(n'-1) d_0 ... d_{n'-1}

    The discount has one factor g fewer than the window has steps, so that the learner multiplies by g once
    more: ``target = reward + g * discount * value(next_observation)`` for every n'.

    One item is written per step as soon as an episode has n steps. Shorter windows are written too: those
    that start at the first observation (s_0 -> s_1, ..., s_0 -> s_{n-1}) and those that end at the last one
    (s_{T-n+1} -> s_T, ..., s_{T-1} -> s_T). An episode of T steps gives T + n - 1 items, or 2T - 1 if T < n::

        n = 3, T = 4:    0->1  0->2  0->3  1->4  2->4  3->4

    Rewards and discounts may be nested or arrays. Where one of them is a single array and the other a nest,
    it is used for each leaf of the nest; leaves broadcast as numpy arrays do, and ``reward`` has the
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
        """Makes an adder for one batched environment.

        Args:
          client: any client of ``framework.replay``.
          n_step: the largest number of steps in a window; at least 1.
          discount: the agent's discount g, in [0, 1].
          priority_fns: ``{table: fn or None}``: each item goes to each table. ``fn`` is given a
          ``Transition`` of
            k items (leaves ``[k, ...]``) and returns k priorities; None means the largest priority so far.
          max_in_flight_items: how many items may wait for room in a table before ``add`` waits too, and about
            how many steps are staged before they are written; None leaves it to the client.
          max_delay: seconds; see ``BlockAdder``.
          frame_stack: the number k of pictures that observations ``[k, ...]`` are stacks of, oldest first.
            Each picture is then stored once instead of k times; readers get the same items. None stores
            observations as they are.
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
        # One row more than the longest window needs: the windows that end an episode which is cut short are
        # known one step late.
        history = self._n if self._n > 1 else 0
        self._frame_stack = frame_stack
        self._pairs: list[_Pair] = []
        self._result_nest: Nest = None
        super().__init__(
            client,
            history,
            self._n,
            priority_fns,
            max_in_flight_items=max_in_flight_items,
            max_delay=max_delay,
            max_staged=max_in_flight_items,  # what is staged has not asked the rate limiter yet either
        )

    @classmethod
    def signature(cls, environment_spec: Any, extras_spec: Nest = ()) -> Transition:
        """The specs of one item, for ``replay.Table(signature=...)``."""
        rewards, discounts = _broadcast_structures(environment_spec.rewards, environment_spec.discounts)

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
                    "that many pictures along the first axis of each observation."
                )
        self._rows = StackedRows(*made_of)

    def _declare(self, action: Nest, timestep: Any, extras: Nest) -> None:
        _broadcast_structures(timestep.reward, timestep.discount)
        super()._declare(action, timestep, extras)
        assert self._reward is not None and self._discount is not None
        self._pairs, self._result_nest = _pair_up(self._reward, self._discount, self._g)

    def _advance(self, kind: Any) -> None:
        if isinstance(self._rows, StackedRows):
            self._rows.check(self._t + 1, np.equal(kind, FIRST))
        super()._advance(kind)

    def _shifted(self, by: int) -> None:
        self._rows.shift(by)

    def _forget(self) -> None:
        self._rows.forget()

    def _emit(self, t: int) -> None:
        history, width, n = self._history, self._width, self._n
        assert self._observation is not None and self._action is not None
        self._rows.append(t)
        kinds = self._kinds[: t + 1]
        # Row u is a transition if an action was taken in it: it exists, is not LAST, and no FIRST follows.
        real = (kinds[:-1] >= FIRST) & (kinds[:-1] < LAST) & (kinds[1:] > FIRST)
        cells = real[history:]
        if not self._pairs:
            return
        length, rewards, discounts = self._windows(real, t)
        if cells.all():
            end = np.arange((history + 1) * width, (t + 1) * width)
            length = length.reshape(-1)
        else:
            picked = np.flatnonzero(cells)
            end = picked + (history + 1) * width
            length = length.reshape(-1)[picked]
            rewards = [reward[picked] for reward in rewards]
            discounts = [discount[picked] for discount in discounts]
        if n > 1:
            tails = self._tails(real, kinds, t)
            if tails is not None:
                tail_cell, tail_end, tail_length, tail_rewards, tail_discounts = tails
                cell = np.concatenate([end - width, tail_cell])
                end = np.concatenate([end, tail_end])
                length = np.concatenate([length, tail_length])
                # In the order of time, then envs; windows of one env and time the longest first.
                order = np.lexsort((-length, cell))
                end, length = end[order], length[order]
                rewards = [np.concatenate(both)[order] for both in zip(rewards, tail_rewards, strict=True)]
                discounts = [
                    np.concatenate(both)[order] for both in zip(discounts, tail_discounts, strict=True)
                ]
        if len(end):
            self._write(end - length * width, end, rewards, discounts)

    def _windows(self, real: np.ndarray, t: int) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """For each step of the block the longest window that ends with it.

        Returns its length ``[steps, B]`` and, per leaf, reward and discount ``[steps * B, *shape]``; numbers
        of steps that are no transition have no meaning.
        """
        history = self._history
        alive = real[history:]
        lengths = alive.astype(np.int64)
        rewards = [pair.first_reward(slice(history, t)) for pair in self._pairs]
        discounts = [pair.discount[history:t] for pair in self._pairs]
        for j in range(1, self._n):
            alive = alive & real[history - j : t - j]
            if not alive.any():
                break
            everywhere = bool(alive.all())
            lengths += alive
            earlier = slice(history - j, t - j)
            for i, pair in enumerate(self._pairs):
                # Backwards in time: R <- r + g d R and D <- g d D.
                factor = pair.discount[earlier] * pair.g
                reward = pair.reward[earlier] + pair.expand(factor) * rewards[i]
                discount = factor * discounts[i]
                if not everywhere:
                    reward = np.where(_like(alive, reward), reward, rewards[i])
                    discount = np.where(_like(alive, discount), discount, discounts[i])
                rewards[i], discounts[i] = reward, discount
        return lengths, [_flat(reward) for reward in rewards], [_flat(discount) for discount in discounts]

    def _tails(
        self, real: np.ndarray, kinds: np.ndarray, t: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray], list[np.ndarray]] | None:
        """The shorter windows of the episodes that end in this block.

        Returns None if there are none, else cell, end (flat indices ``time * B + env``), length, and per
        leaf rewards and discounts.
        """
        history, width = self._history, self._width
        here, after = kinds[history:t], kinds[history + 1 :]
        cut = (after == FIRST) & (here != LAST)
        ends = cut | (after == LAST)
        if not ends.any():
            return None
        steps, envs = np.nonzero(ends)
        times = steps + history
        # The episode's last transition: of an episode that is cut short it is the one before its open row.
        last = times - cut[steps, envs]
        alive = real[last, envs]
        parts: list[tuple[np.ndarray, ...]] = []
        reward_parts: list[list[np.ndarray]] = []
        discount_parts: list[list[np.ndarray]] = []
        rewards = [pair.first_reward((last, envs)) for pair in self._pairs]
        discounts = [pair.discount[last, envs] for pair in self._pairs]
        for j in range(1, self._n):
            # A window of j steps is a tail if a longer one ends here too; the longest is already an item.
            alive = alive & real[last - j, envs]
            if not alive.any():
                break
            end = (last + 1) * width + envs
            cell = times * width + envs
            parts.append((cell[alive], end[alive], np.full(int(alive.sum()), j, np.int64)))
            reward_parts.append([reward[alive] for reward in rewards])
            discount_parts.append([discount[alive] for discount in discounts])
            for i, pair in enumerate(self._pairs):
                factor = pair.discount[last - j, envs] * pair.g
                rewards[i] = pair.reward[last - j, envs] + pair.expand(factor, 1) * rewards[i]
                discounts[i] = factor * discounts[i]
        if not parts:
            return None
        cells, end_rows, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
        return (
            cells,
            end_rows,
            lengths,
            [np.concatenate(leaf) for leaf in zip(*reward_parts, strict=True)],
            [np.concatenate(leaf) for leaf in zip(*discount_parts, strict=True)],
        )

    def _write(
        self, start: np.ndarray, end: np.ndarray, rewards: list[np.ndarray], discounts: list[np.ndarray]
    ) -> None:
        """Items from the observation at ``start`` to that at ``end`` (flat indices ``time * B + env``)."""
        assert self._observation is not None and self._action is not None
        actions = self._action.take(start)
        extras = [] if self._extras is None else self._extras.take(start)
        reward_names = [pair.reward_name for pair in self._pairs]
        discount_names = [pair.discount_name for pair in self._pairs]
        columns = dict(zip(self._action.names, actions, strict=True))
        columns.update(zip(reward_names, rewards, strict=True))
        columns.update(zip(discount_names, discounts, strict=True))
        columns.update(zip(self._extras_names(), extras, strict=True))
        made = self._writer.append(_TRANSITIONS, columns)
        before, after = self._rows.at(start), self._rows.at(end)

        observation, stream = self._observation, self._rows.stream

        def make(part: slice) -> Transition:
            assert self._action is not None
            at, to, own = before[part], after[part], made[part]

            def slices(of: str, names: list[str], rows: np.ndarray) -> list[Any]:
                return [self._writer.slice(of, name, rows) for name in names]

            return Transition(
                observation=observation.nest(slices(stream, observation.names, at)),
                action=self._action.nest(slices(_TRANSITIONS, self._action.names, own)),
                reward=self._nest_result(slices(_TRANSITIONS, reward_names, own)),
                discount=self._nest_result(slices(_TRANSITIONS, discount_names, own)),
                next_observation=observation.nest(slices(stream, observation.names, to)),
                extras=self._extras_nest(slices(_TRANSITIONS, self._extras_names(), own)),
            )

        def data() -> Transition:
            assert self._action is not None
            return Transition(
                observation=observation.nest(observation.take(start)),
                action=self._action.nest(actions),
                reward=self._nest_result([reward.copy() for reward in rewards]),
                discount=self._nest_result([discount.copy() for discount in discounts]),
                next_observation=observation.nest(observation.take(end)),
                extras=self._extras_nest(extras),
            )

        self._write_items(make, len(start), data)
        self._release(_TRANSITIONS, made)

    def _nest_result(self, leaves: list[Any]) -> Nest:
        if len(leaves) == 1 and not tree.is_nested(self._result_nest):
            return leaves[0]
        return tree.unflatten_as(self._result_nest, leaves)


class _Pair:
    """A reward leaf with the discount leaf that belongs to it; arrays ``[time, B, *shape]``."""

    def __init__(
        self, reward_name: str, discount_name: str, reward: np.ndarray, discount: np.ndarray, g: float
    ):
        self.reward_name = reward_name
        self.discount_name = discount_name
        shape = np.broadcast_shapes(reward.shape[2:], discount.shape[2:])
        self.discount = discount
        # The agent's discount in the dtype of the environment's: float32 rewards stay float32.
        self.g = discount.dtype.type(g)
        self._dims = len(shape)
        self._shape = shape
        self._dtype = np.result_type(reward.dtype, discount.dtype)
        # A view in which the axes after [time, B] line up with those of the broadcast shape.
        self.reward = reward.reshape(
            *reward.shape[:2], *(1,) * (len(shape) - reward.ndim + 2), *reward.shape[2:]
        )

    def expand(self, array: np.ndarray, leading: int = 2) -> np.ndarray:
        """``array`` (shaped like discounts after ``leading`` axes) with axes that line up with rewards."""
        missing = self._dims - (array.ndim - leading)
        return (
            array.reshape(*array.shape[:leading], *(1,) * missing, *array.shape[leading:])
            if missing
            else array
        )

    def first_reward(self, index: Any) -> np.ndarray:
        """The rewards of windows of one step, in the broadcast shape and the result's dtype."""
        reward = self.reward[index]
        if reward.shape[reward.ndim - self._dims :] != self._shape:
            reward = np.broadcast_to(reward, (*reward.shape[: reward.ndim - self._dims], *self._shape))
        return reward.astype(self._dtype, copy=False)


def _broadcast_structures(rewards: Nest, discounts: Nest) -> tuple[Nest, Nest]:
    """Both in the same structure: a single leaf stands beside each leaf of the other nest."""
    if not tree.is_nested(rewards) and tree.is_nested(discounts):
        return tree.map_structure(lambda _: rewards, discounts), discounts
    if tree.is_nested(rewards) and not tree.is_nested(discounts):
        return rewards, tree.map_structure(lambda _: discounts, rewards)
    try:
        tree.assert_same_structure(rewards, discounts)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"reward and discount: got the structures {rewards!r} and {discounts!r}, expected the "
            "same one, or "
            "a single array for one of them."
        ) from error
    return rewards, discounts


def _pair_up(reward: Field, discount: Field, g: float) -> tuple[list[_Pair], Nest]:
    """The pairs of leaves and the structure that items have them in."""
    template = reward.template if tree.is_nested(reward.template) else discount.template
    paths = [path for path, _ in tree.flatten_with_path(template)]
    rewards = reward.arrays * len(paths) if len(reward.arrays) < len(paths) else reward.arrays
    discounts = discount.arrays * len(paths) if len(discount.arrays) < len(paths) else discount.arrays
    pairs = [
        _Pair(column_name("reward", path), column_name("discount", path), r, d, g)
        for path, r, d in zip(paths, rewards, discounts, strict=True)
    ]
    return pairs, template


def _like(mask: np.ndarray, array: np.ndarray) -> np.ndarray:
    return mask.reshape(*mask.shape, *(1,) * (array.ndim - mask.ndim))


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:])
