"""Numbers of the episodes that ended since the last row of metrics."""

from __future__ import annotations

import numpy as np


class EpisodeStatistics:
    """Gathers returns and lengths of finished episodes, and summarises them once per row."""

    def __init__(self) -> None:
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._new = 0
        self._total = 0

    def add(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """Takes the episodes that ended in one batched step: ``[k]`` returns and ``[k]`` lengths."""
        self._returns.extend(np.atleast_1d(returns).astype(float).tolist())
        self._lengths.extend(np.atleast_1d(lengths).astype(int).tolist())
        self._new += np.atleast_1d(returns).shape[0]
        self._total += np.atleast_1d(returns).shape[0]

    def take_new(self) -> int:
        """Episodes since the last call."""
        new, self._new = self._new, 0
        return new

    def summary(self) -> dict[str, float]:
        """Mean, minimum and maximum since the last call; only the count if no episode ended."""
        row: dict[str, float] = {"episodes": self._total}
        if self._returns:
            row["episode_return"] = float(np.mean(self._returns))
            row["episode_return_min"] = float(np.min(self._returns))
            row["episode_return_max"] = float(np.max(self._returns))
            row["episode_length"] = float(np.mean(self._lengths))
        self._returns.clear()
        self._lengths.clear()
        return row
