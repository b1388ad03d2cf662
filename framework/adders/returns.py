"""n-step returns of a block of time steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tree

from framework.adders.fields import Field, column_name
from framework.types import FIRST, LAST, Nest


class Windows(NamedTuple):
    """Windows of up to n steps; rows are flat indices `time * B + env`.

    Attributes:
      start: int64 `[k]`, the row of the first action.
      end: int64 `[k]`, the row after the last action.
      rewards: one `[k, ...]` per leaf, discounted sums.
      discounts: one `[k, ...]` per leaf, discounted products.
    """

    start: np.ndarray
    end: np.ndarray
    rewards: list[np.ndarray]
    discounts: list[np.ndarray]


class _Part(NamedTuple):
    """Windows of one length."""

    length: int
    cell: np.ndarray  # the row that completed the windows
    end: np.ndarray
    rewards: list[np.ndarray]
    discounts: list[np.ndarray]


class Returns:
    """Sums rewards and multiplies discounts over windows; see `NStepTransitionAdder` for the formula.

    Rewards and discounts come in pairs, one per leaf of the larger nest. The two leaves of a pair broadcast.
    """

    def __init__(self, reward: Field, discount: Field, n_step: int, g: float):
        """Prepares the sums.

        Args:
          reward: the staged rewards `[time, B, ...]`.
          discount: the staged discounts `[time, B, ...]`.
          n_step: the largest number of steps in a window.
          g: the agent's discount.
        """
        rewards, _ = broadcast_structures(reward.template, discount.template)
        self.template = rewards
        paths = [path for path, _ in tree.flatten_with_path(rewards)]
        self.reward_names = [column_name("reward", path) for path in paths]
        self.discount_names = [column_name("discount", path) for path in paths]
        self._n = n_step
        self._rewards: list[np.ndarray] = []
        self._discounts: list[np.ndarray] = []
        self._shapes: list[tuple[int, ...]] = []  # of one discount
        self._dtypes: list[np.dtype] = []  # of the sums
        self._g: list[np.generic] = []
        for i in range(len(paths)):
            r = reward.arrays[i if len(reward.arrays) > 1 else 0]
            d = discount.arrays[i if len(discount.arrays) > 1 else 0]
            shape = np.broadcast_shapes(r.shape[2:], d.shape[2:])
            # Views whose axes after [time, B] line up; rewards have the shape of the sums.
            self._rewards.append(np.broadcast_to(_with_axes(r, len(shape)), (*r.shape[:2], *shape)))
            self._discounts.append(_with_axes(d, len(shape)))
            self._shapes.append(d.shape[2:])
            self._dtypes.append(np.result_type(r.dtype, d.dtype))
            # In the dtype of the environment's discount: float32 rewards stay float32.
            self._g.append(d.dtype.type(g))

    def nest(self, leaves: list[Any]) -> Nest:
        """Returns `leaves` in the structure of the items' rewards and discounts."""
        return tree.unflatten_as(self.template, leaves) if tree.is_nested(self.template) else leaves[0]

    def windows(self, kinds: np.ndarray, history: int) -> Windows | None:
        """Returns the windows that rows `[history, t)` complete, by time, then env, then the longest first.

        Args:
          kinds: int8 `[t + 1, B]` step types of the rows, -1 where there is no row.
          history: number of rows at the front whose windows earlier calls returned.
        """
        # Row u is a transition if an action was taken in it: it exists, is not LAST, and no FIRST follows.
        real = (kinds[:-1] >= FIRST) & (kinds[:-1] < LAST) & (kinds[1:] > FIRST)
        here, after = kinds[history:-1], kinds[history + 1 :]
        parts = self._parts(real, history, 0, after == LAST)
        if self._n > 1:
            # An episode that is cut short is known one row late: when the row after its closing row is FIRST.
            cut = (after == FIRST) & (here != LAST)
            if np.count_nonzero(cut):
                parts += self._parts(real, history, 1, cut)
        if not parts:
            return None
        width = kinds.shape[1]
        if len(parts) == 1:
            length: int | np.ndarray
            length, _, end, rewards, discounts = parts[0]
        else:
            cell = np.concatenate([part.cell for part in parts])
            lengths = np.repeat([part.length for part in parts], [len(part.cell) for part in parts])
            order = np.lexsort((-lengths, cell))
            length = lengths[order]
            end = np.concatenate([part.end for part in parts])[order]
            rewards = [np.concatenate(leaf)[order] for leaf in zip(*[p.rewards for p in parts], strict=True)]
            discounts = [
                np.concatenate(leaf)[order] for leaf in zip(*[p.discounts for p in parts], strict=True)
            ]
        return Windows(end - length * width, end, rewards, discounts)

    def _parts(self, real: np.ndarray, history: int, back: int, ending: np.ndarray) -> list[_Part]:
        """Returns windows whose last transition is `back` rows before each row from `history` on.

        Windows of all lengths are items at the end of an episode; elsewhere only the longest is. The longest
        window of an episode that is cut short (`back` 1) is an item already.
        """
        begin, end, width = history - back, len(real) - back, real.shape[1]
        alive = real[begin:end]
        sums = [
            r[begin:end].astype(dtype, copy=False)
            for r, dtype in zip(self._rewards, self._dtypes, strict=True)
        ]
        products = [discount[begin:end] for discount in self._discounts]
        parts = []
        for length in range(1, self._n + 1):
            if length < self._n:
                longer = alive & real[begin - length : end - length]
                wanted = longer & ending if back else alive & (ending | ~longer)
            elif back:
                break
            else:
                longer, wanted = None, alive
            count = np.count_nonzero(wanted)
            if count:
                everywhere = count == wanted.size
                cell = np.arange(count) if everywhere else np.flatnonzero(wanted)
                picked = slice(None) if everywhere else cell
                parts.append(
                    _Part(
                        length,
                        cell,
                        cell + (begin + 1) * width,
                        [array.reshape(-1, *array.shape[2:])[picked] for array in sums],
                        [
                            a.reshape(-1, *shape)[picked]
                            for a, shape in zip(products, self._shapes, strict=True)
                        ],
                    )
                )
            if longer is None or not np.count_nonzero(longer):
                break
            # Backwards in time: R <- r + g d R and D <- g d D. Cells without a longer window are not read.
            earlier = slice(begin - length, end - length)
            factors = [d[earlier] * g for d, g in zip(self._discounts, self._g, strict=True)]
            sums = [r[earlier] + f * s for r, f, s in zip(self._rewards, factors, sums, strict=True)]
            products = [f * p for f, p in zip(factors, products, strict=True)]
            alive = longer
        return parts


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
