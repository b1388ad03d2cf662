"""The end of a budget of env steps: all items go to replay, and the learner draws what its limiter allows."""

from __future__ import annotations

import logging
import time
from typing import Any

import launch
from framework.replay import TableInfo
from framework.replay.errors import DeadlineExceededError, WouldBlockError
from framework.workers.collector import Collector, Turns
from framework.workers.gates import Gate
from framework.workers.worker import BOUNDLESS

_WAIT_S = 0.1  # Wait for room, or for a version of the parameters, between two looks.
_BLOCKED_S = 1.0  # No sample comes, while a reader waits for more than replay gives.
_STARTS_S = 60.0  # No sample comes otherwise: the learner may be starting, or in a long step.
_LOG = logging.getLogger(__name__)


class LastSamples(Gate):
    """Keeps a program from ending while its learner is behind.

    An engine may run the learner late: actors are then ahead by all that the limiter and the writers allow.
    An actor whose steps are spent therefore waits until its items are in their tables, and until those give
    no further sample. The number of learner steps then follows from the items, on every engine. Only a plan
    that learns in a thread of its own may drop the last batch.

    Args:
      name: name of the actor.
      replay: the replay client of its adders.
      counter: counts the learner's steps.
      steps_name: name of that count.
      collector: has the adders.
    """

    def __init__(self, name: str, replay: Any, counter: Any, steps_name: str, collector: Collector | Turns):
        self._collector = collector
        self._name, self._replay, self._counter, self._steps_name = name, replay, counter, steps_name
        self._seen: tuple[int, int] | None = None  # Samples and learner steps at the last look.
        self._moved_at = 0.0  # When they last changed.

    def open(self) -> bool:
        """Looks once, and waits a moment if not. On the serial engine, the learner has a turn between looks.

        Nothing is waited for that cannot come: a reader that draws nothing for too long ends the wait.
        """
        is_serial = launch.get_node_context().engine == "serial"
        flushed = True
        for adder in self._collector.adders:
            try:
                adder.flush(timeout=0 if is_serial else _WAIT_S)
            except (DeadlineExceededError, WouldBlockError):
                flushed = False
        try:
            tables = _that_are_read(self._replay.server_info(timeout=5).values())
        except DeadlineExceededError:  # It is busy.
            return False
        if flushed and all(table.why_not_sample for table in tables):
            return True
        samples = [table.rate_limiter_info.sample_stats for table in tables]
        steps = self._counter.get_counts().get(self._steps_name, 0)
        before, self._seen = self._seen, (sum(stats.completed for stats in samples), steps)
        now = time.monotonic()
        if self._seen != before:
            self._moved_at = now
        elif is_serial:
            return True
        elif now - self._moved_at > (_BLOCKED_S if any(stats.pending for stats in samples) else _STARTS_S):
            _LOG.warning("%s: the learner stopped drawing before it had all samples.", self._name)
            return True
        if not is_serial:
            self._counter.wait_for(self._steps_name, steps + 1, timeout=_WAIT_S)
        return False


def _that_are_read(tables: Any) -> list[TableInfo]:
    """The tables that keep a ratio, without those that nothing has read while something reads others."""
    bounded = [table for table in tables if table.rate_limiter_info.min_diff > -BOUNDLESS]
    read = [each for each in bounded if any(each.rate_limiter_info.sample_stats[:2])]
    return read or bounded
