"""Numbers of the episodes that ended since the last row of metrics."""

from __future__ import annotations

import numpy as np


class EpisodeStatistics:
    """Gathers returns and lengths of finished episodes, and summarizes them once per row.

    Attributes:
      total: episodes since it was made.
    """

    def __init__(self) -> None:
        self.total = 0
        self._returns: list[float] = []
        self._lengths: list[int] = []

    def add(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """Takes the episodes that ended in one batched step: ``[k]`` returns and ``[k]`` lengths."""
        self._returns.extend(returns.tolist())
        self._lengths.extend(lengths.tolist())
        self.total += len(lengths)

    def summary(self) -> dict[str, float]:
        """Mean, minimum and maximum since the last call; only the count if no episode ended."""
        row: dict[str, float] = {"episodes": self.total}
        if self._returns:
            row["episode_return"] = float(np.mean(self._returns))
            row["episode_return_min"] = float(np.min(self._returns))
            row["episode_return_max"] = float(np.max(self._returns))
            row["episode_length"] = float(np.mean(self._lengths))
        self._returns.clear()
        self._lengths.clear()
        return row
