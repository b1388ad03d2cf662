"""The service that takes the metrics of all nodes of a program and ends the program."""

from __future__ import annotations

import threading
import time
from typing import Any


class Monitor:
    """Writes the rows of all nodes to the logger, adds rates, and keeps the newest rows for `snapshot`.

    Args:
      logger: an object with `write(dict)` and `close()`. None keeps the rows in memory only.
      on_write: called with `snapshot()` after every row, in the node's process.
      replay: a replay client, whose counters are added to the learner's rows; None without replay.
      counter: the counter, whose counts are added to the learner's rows.
    """

    def __init__(self, logger: Any = None, *, on_write: Any = None, replay: Any = None, counter: Any = None):
        self._logger, self._on_write = logger, on_write
        self._replay, self._counter = replay, counter
        self._lock = threading.Lock()
        self._latest: dict[str, dict[str, Any]] = {}
        self._started = time.monotonic()
        self._rate = (0, self._started)  # Env steps and time of the learner's last row.
        self._result: dict[str, Any] | None = None

    def write(self, label: str, row: dict[str, Any]) -> None:
        """Takes one row (names to scalars) of `label`, such as `"actor-0"` or `"learner"`."""
        row = dict(row)
        if label == "learner":
            row.update(self._shared_numbers(row))
        with self._lock:
            self._latest[label] = {**self._latest.get(label, {}), **row}
            if self._logger is not None:
                self._logger.write({"label": label, **row, "time/wall_s": time.monotonic() - self._started})
        if self._on_write is not None:
            self._on_write(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """The newest row of each label: `{"labels": {label: row}, "counts": …, "result": …}`."""
        with self._lock:
            labels = {k: dict(v) for k, v in self._latest.items()}
        counts = self._counter.get_counts() if self._counter is not None else {}
        return {
            "labels": labels,
            "counts": counts,
            "seconds": time.monotonic() - self._started,
            "result": self._result,
        }

    def finish(self, reason: str, numbers: dict[str, Any]) -> None:
        """Ends the program with the result `{"reason": reason, **numbers}`. Only the first call counts."""
        import launch

        with self._lock:
            if self._result is None:
                self._result = {"reason": reason, **numbers}
            result = self._result
        launch.stop(result)

    def close(self) -> None:
        """Flushes and closes the logger."""
        if self._logger is not None:
            self._logger.close()

    def _shared_numbers(self, row: dict[str, Any]) -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        if self._counter is not None:
            counts = self._counter.get_counts()
            made, now = counts.get("env_steps", 0), time.monotonic()
            numbers["env_steps"] = made
            numbers["time/env_steps_per_s"] = (made - self._rate[0]) / max(now - self._rate[1], 1e-9)
            self._rate = (made, now)
        versions = [
            r["variables_version"]
            for k, r in self._latest.items()
            if "variables_version" in r and k.startswith("actor")
        ]
        if versions:
            numbers["acting_staleness"] = float(row["version"] - sum(versions) / len(versions))
        if self._replay is not None:
            numbers.update(replay_numbers(self._replay.server_info(timeout=5)))
        return numbers


def replay_numbers(info: dict[str, Any]) -> dict[str, Any]:
    """Counters of each table of a `server_info`, since the start of the server.

    They are `size`, `inserted`, `sampled`, `samples_per_insert`, `sample_age` (mean number of items inserted
    between the insert of an item and its sampling) and `time/…_blocked_s` (seconds that inserts and samples
    waited for the rate limiter). A back end without the last two omits them.
    """
    numbers: dict[str, Any] = {}
    for name, table in info.items():
        prefix = "replay" if len(info) == 1 else f"replay/{name}"
        limiter = table.rate_limiter_info
        inserted, sampled = limiter.insert_stats.completed, limiter.sample_stats.completed
        numbers[f"{prefix}/size"] = table.current_size
        numbers[f"{prefix}/inserted"] = inserted
        numbers[f"{prefix}/sampled"] = sampled
        numbers[f"{prefix}/samples_per_insert"] = sampled / max(inserted, 1)
        if hasattr(table, "sampled_age"):
            numbers[f"{prefix}/sample_age"] = table.sampled_age / max(sampled, 1)
            numbers[f"time/{prefix}/insert_blocked_s"] = limiter.insert_stats.blocked_ms / 1000
            numbers[f"time/{prefix}/sample_blocked_s"] = limiter.sample_stats.blocked_ms / 1000
    return numbers
