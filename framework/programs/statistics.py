"""Statistics of finished episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def summarize(ended: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean, minimum and maximum of the results of `EnvironmentLoop.step`; empty if no episode ended."""
    if not ended:
        return {}
    returns = np.concatenate([episodes["episode_return"] for episodes in ended])
    lengths = np.concatenate([episodes["episode_length"] for episodes in ended])
    return {
        "episode_return": float(np.mean(returns)),
        "episode_return_min": float(np.min(returns)),
        "episode_return_max": float(np.max(returns)),
        "episode_length": float(np.mean(lengths)),
    }
