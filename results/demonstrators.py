"""Demonstrations of the toys of ``learning.py``, for DQfD's rows of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from framework import environments
from framework.datasets import record
from framework.types import Nest, Step


def board(count: int = 4, seed: int = 0) -> Iterator[Step]:
    """Episodes of `testing:Masked`: the row of the goal first, then its column."""

    def act(observation: Nest) -> np.ndarray:
        row, column, goal_row, goal_column = observation["board"].reshape(4, -1).argmax(1)
        if row != goal_row:
            return np.array([0 if goal_row < row else 1])
        return np.array([2 if goal_column < column else 3])

    environment = environments.make("testing:Masked", num_envs=1, seed=seed)
    yield from record(environment, act, count)
    environment.close()


def pair(count: int = 8, seed: int = 0) -> Iterator[Step]:
    """Episodes of `testing:Tuple` with a choice of 3 and one of 2, which `CombineActions` makes one of 6."""

    def act(observation: Nest) -> np.ndarray:
        first, second = observation[0, :3].argmax(), observation[0, 3:].argmax()
        return np.array([2 * first + second])

    environment = environments.make(
        "testing:Tuple",
        seed=seed,
        options={"choices": (3, 2), "numbers": ()},
        wrappers=(environments.CombineActions,),
    )
    yield from record(environment, act, count)
    environment.close()
