"""The results of episodes, as an `EnvironmentLoop` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tree

from framework.specs import REWARD, path_name
from framework.types import FIRST, MultiAgentTimeStep, Nest

_OF_THE_LOOP = ("episode_return", "episode_length", "env")  # In every result; others are of observers.


def numbers(name: str, nest: Nest) -> dict[str, Any]:
    """The numbers of a nest of arrays by name, such as `episode_return/agent_0`; one number has `name`."""
    found = {}
    for path, leaf in tree.flatten_with_path(nest):
        for index in np.ndindex(np.shape(leaf)):
            found[path_name(name, (*path, *index))] = np.asarray(leaf).item(*index)
    return found


def joined(ended: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of several steps as one."""
    return ended[0] if len(ended) == 1 else tree.map_structure(lambda *parts: np.concatenate(parts), *ended)


def cut_short(timestep: Any, limit: int) -> tuple[bool, Any]:
    """Keeps the first `limit` transitions, and makes FIRST steps of the others; returns whether there are."""
    moved = timestep.step_type != FIRST
    beyond = moved & (np.cumsum(moved) > limit)
    if not beyond.any():
        return False, timestep

    def put(array: np.ndarray, value: float) -> np.ndarray:
        array = np.array(array)
        array[beyond] = value
        return array

    cut = timestep._replace(
        step_type=put(timestep.step_type, FIRST),
        reward=tree.map_structure(lambda reward: put(reward, 0), timestep.reward),
        discount=tree.map_structure(lambda discount: put(discount, 1), timestep.discount),
    )
    if isinstance(cut, MultiAgentTimeStep):
        cut = cut._replace(agents=tree.map_structure(lambda kinds: put(kinds, FIRST), cut.agents))
    return True, cut


def summarize(ended: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean, minimum and maximum of the results of `EnvironmentLoop.step`; empty if no episode ended.

    With several agents, they are of the mean return of all agents; `episode_return/AGENT` is each agent's.
    With costs beside a reward, they are the reward's. Of arrays of other names, such as metrics of observers,
    the mean over the results that have them.
    """
    if not ended:
        return {}
    lengths = np.concatenate([episodes["episode_length"] for episodes in ended])
    each = tree.map_structure(lambda *parts: np.concatenate(parts), *[one["episode_return"] for one in ended])
    of_agents = each if isinstance(each, dict) else {}
    returns = of_agents[REWARD] if REWARD in of_agents else np.mean(tree.flatten(each), axis=0)
    observed = dict.fromkeys(name for episodes in ended for name in episodes if name not in _OF_THE_LOOP)
    return {
        **{
            name: float(np.mean(np.concatenate([episodes[name] for episodes in ended if name in episodes])))
            for name in observed
        },
        **{f"episode_return/{agent}": float(np.mean(of_agents[agent])) for agent in of_agents},
        "episode_return": float(np.mean(returns)),
        "episode_return_min": float(np.min(returns)),
        "episode_return_max": float(np.max(returns)),
        "episode_length": float(np.mean(lengths)),
    }
