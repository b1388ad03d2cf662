"""`record`: plays episodes and yields them as `write_episodes` takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tree

from framework.environments.base import BatchedEnvironment
from framework.environments.tensor import as_arrays
from framework.types import FIRST, LAST, Nest, Step


def record(environment: BatchedEnvironment, act: Callable[[Nest], Nest], num_episodes: int) -> Iterator[Step]:
    """Plays whole episodes, truncated ones included, and yields each as a `Step`.

    An episode that the environment loses before its end, or continues across a reset
    (`BatchedEnvironment.cut`), is dropped, and another one is played.

    Args:
      environment: an environment of one env; see `environments.make`.
      act: observation `[1, ...]` to action `[1, ...]`, such as a function or a `LoadedPolicy`, whose
        memory restarts with each episode: its `reset` is called.
      num_episodes: number of episodes.

    Raises:
      ValueError: The environment has several envs.
    """
    if environment.num_envs != 1:
        raise ValueError(f"environment: got {environment.num_envs} envs, expected 1. Pass num_envs=1.")
    restart = getattr(act, "reset", None)
    environment, num_yielded = as_arrays(environment), 0
    while num_yielded < num_episodes:
        rows: list[tuple[Any, ...]] = []
        timestep = environment.reset()
        begun_before = environment.cut is not None and bool(environment.cut[0])
        while timestep.step_type[0] != LAST:
            if not rows and restart is not None:
                restart()
            action = act(timestep.observation)
            following = environment.step(action)
            if following.step_type[0] == FIRST:  # The env was lost, and its episode has no end.
                rows, timestep, begun_before = [], following, False
                continue
            # The environment takes other dtypes; replay holds the spec's.
            spec = environment.action_spec()
            leaves = zip(tree.flatten(spec), tree.flatten_up_to(spec, action, check_types=False), strict=True)
            action = tree.unflatten_as(spec, [np.asarray(leaf, of.dtype) for of, leaf in leaves])
            result = (following.reward, following.discount)
            # Copied, since the environment and the policy may use their arrays again.
            row = (timestep.observation, action, *result, np.array([not rows]))
            rows.append(tree.map_structure(np.array, row))
            timestep = following
        if begun_before:
            continue
        closing = tree.map_structure(np.zeros_like, rows[-1])
        rows.append((tree.map_structure(np.array, timestep.observation), *closing[1:]))
        yield Step(*tree.map_structure(lambda *leaves: np.concatenate(leaves), *rows))
        num_yielded += 1
