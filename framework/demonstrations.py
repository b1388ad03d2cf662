"""Demonstrations: episodes of a demonstrator, in files and in replay.

```python
environment = environments.make("gymnasium:MountainCar-v0", num_envs=1, seed=0)
episodes = list(demonstrations.record(environment, act, 5))  # act([1, ...]) -> [1, ...]
demonstrations.save("episodes.npz", episodes)
```

An episode of T transitions is a `Step` of T + 1 rows: row t has the observation at time t, the action taken
there, and the reward and discount that resulted from it. The last row holds the last observation, with zero
action, reward and discount. The discount is 0 for a transition that terminates the episode, else 1.

A file is a `.npz` with the rows of all episodes, one after the other. It has an array `[rows, ...]` for each
leaf of `observation`, `action`, `reward`, `discount` and `start_of_episode` (bool), named by its path as in
`observation/camera`, and `structure`: the JSON of the structure of a dict of the five; see `framework.nest`.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest
from framework.adders import Adder
from framework.environments.base import BatchedEnvironment
from framework.environments.tensor import as_arrays
from framework.objects import named
from framework.programs.loading import LoadedPolicy
from framework.specs import EnvironmentSpec
from framework.types import FIRST, LAST, Nest, Step

_FIELDS = ("observation", "action", "reward", "discount", "start_of_episode")


def record(environment: BatchedEnvironment, act: Callable[[Nest], Nest], num_episodes: int) -> Iterator[Step]:
    """Plays whole episodes, truncated ones included, and yields each as a `Step`.

    An episode that the environment loses before its end, or continues across a reset
    (`BatchedEnvironment.cut`), is dropped, and another one is played.

    Args:
      environment: an environment of one env; see `environments.make`.
      act: observation `[1, ...]` to action `[1, ...]`, such as a function or a `LoadedPolicy`.
      num_episodes: number of episodes.

    Raises:
      ValueError: The environment has several envs.
    """
    if environment.num_envs != 1:
        raise ValueError(f"environment: got {environment.num_envs} envs, expected 1. Pass num_envs=1.")
    environment, num_yielded = as_arrays(environment), 0
    while num_yielded < num_episodes:
        rows: list[tuple[Any, ...]] = []
        timestep = environment.reset()
        begun_before = environment.cut is not None and bool(environment.cut[0])
        while timestep.step_type[0] != LAST:
            if not rows and isinstance(act, LoadedPolicy):
                act.reset()  # The memory restarts.
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


def save(path: str | os.PathLike[str], episodes: Iterable[Step]) -> None:
    """Writes episodes to the `.npz` file `path`; see the module."""
    if not os.fspath(path).endswith(".npz"):
        raise ValueError(f"path: got {os.fspath(path)!r}, expected the name of a .npz file.")
    parts = [each[:5] for each in episodes]
    if not parts:
        raise ValueError("episodes: got none, expected at least one. Record them with demonstrations.record.")
    rows = tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)
    leaves, structure = nest.flatten(dict(zip(_FIELDS, rows, strict=True)))
    arrays = dict(zip(nest.paths(structure), leaves, strict=True))
    np.savez_compressed(path, structure=np.array(json.dumps(structure)), **arrays)


def load(source: str) -> list[Step]:
    """The episodes of a file, or of an iterator.

    Args:
      source: a `.npz` file, or `module:function`, which returns the episodes; `module:function(count=5)`
        passes arguments.

    Raises:
      ValueError: There are no episodes, or their rows do not have the format that the module describes.
      OSError: The file cannot be read.
    """
    if source.endswith(".npz"):
        try:
            with np.load(source, allow_pickle=False) as file:
                structure = json.loads(str(file["structure"]))
                fields = nest.packer(structure)([file[name] for name in nest.paths(structure)])
                rows = Step(*[fields[field] for field in _FIELDS])
        except KeyError as error:
            raise ValueError(
                f"demonstrations: {source!r} has no {error}, expected a file of demonstrations.save."
            ) from error
        except (zipfile.BadZipFile, zlib.error, EOFError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"demonstrations: got {source!r}, which cannot be read ({error}), expected a file of "
                "demonstrations.save. It may be incomplete: write or copy it again."
            ) from error
        if {len(leaf) for leaf in tree.flatten(rows[:5])} != {len(rows.start_of_episode)} or not all(
            rows.start_of_episode[:1]
        ):
            raise ValueError(
                f"demonstrations: got rows of {source!r} that are not whole episodes, expected arrays of one "
                "length whose first row starts an episode. Write them with demonstrations.save."
            )
        begins = np.flatnonzero(rows.start_of_episode)
        episodes = [
            Step(*tree.map_structure(lambda leaf, a=a, b=b: leaf[a:b], rows[:5]))
            for a, b in zip(begins, [*begins[1:], len(rows.start_of_episode)], strict=True)
        ]
    elif ":" not in source:
        raise ValueError(
            f"demonstrations: got {source!r}, expected a file whose name ends in .npz, or module:function."
        )
    else:
        made: Callable[..., Iterable[Step]] = named(source, {}, "demonstrations")
        episodes = list(made())
    lengths = [len(each.start_of_episode) for each in episodes]
    if not lengths or min(lengths) < 2:
        raise ValueError(
            f"demonstrations: got episodes of {lengths} rows in {source!r}, expected at least one, each with "
            "a transition and a closing row. Record them with demonstrations.record."
        )
    return episodes


def check(episodes: Sequence[Step], spec: EnvironmentSpec) -> None:
    """Raises ValueError unless the episodes have the structure, shapes and dtypes of `spec`."""
    for field, expected in zip(Step._fields[:4], spec, strict=True):
        wanted = tree.map_structure(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", expected)
        for episode in episodes:
            rows = getattr(episode, field)
            found = tree.map_structure(lambda leaf: f"{leaf.dtype}{list(leaf.shape[1:])}", rows)
            if found != wanted:
                raise ValueError(
                    f"demonstrations: got the {field} {found}, expected {wanted} as in the environment. "
                    "Record them in the same environment, with the same wrappers and options."
                )


def write(episode: Step, adder: Adder) -> None:
    """Plays an episode into an adder, and closes it."""
    last = len(episode.reward) - 1

    def row(t: int) -> tuple[Any, ...]:
        return tuple(tree.map_structure(lambda leaf: leaf[t], episode[:4]))

    adder.add_first(dm_env.restart(row(0)[0]))
    for t in range(last):
        _, action, reward, discount = row(t)
        kind = dm_env.StepType.LAST if t + 1 == last else dm_env.StepType.MID
        adder.add(action, dm_env.TimeStep(kind, reward, discount, row(t + 1)[0]))
    adder.close()
