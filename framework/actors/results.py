"""Statistics of the episodes that an environment loop has played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tree

_OF_THE_LOOP = ("episode_return", "episode_length", "env")  # In every result; others are of observers.


def summarize(ended: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean, minimum and maximum of the results of `EnvironmentLoop.step`; empty if no episode ended.

    With several agents, they are of the mean return of all agents; `episode_return/AGENT` is each agent's.
    Of arrays of other names, such as metrics of observers, the mean over the results that have them.
    """
    if not ended:
        return {}
    lengths = np.concatenate([episodes["episode_length"] for episodes in ended])
    each = tree.map_structure(lambda *parts: np.concatenate(parts), *[one["episode_return"] for one in ended])
    returns = np.mean(tree.flatten(each), axis=0)
    of_agents = each if isinstance(each, dict) else {}
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
