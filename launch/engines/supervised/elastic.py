"""Groups that may lose nodes while the program continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.engines.base import LONG_LIFE_S
from launch.engines.supervised.process import Process

_ERRORS = 5  # Exceptions of one node that are forgiven in a row, unless it lived for LONG_LIFE_S seconds.
_PLACE_S = 5.0  # After which a node that waits for its start counts as one without a place.
_THERE = ("running", "returned", "closing", "closed")


class ElasticGroups:
    """Counts the nodes of the groups in `min_nodes`, and notes since when a group has too few.

    A node counts from the end of its constructor until its process ends.

    Args:
      min_nodes: the smallest number of nodes by group.
      timeout: seconds for which a group may have fewer nodes, including at the start of the program.
    """

    def __init__(self, min_nodes: Mapping[str, int], timeout: float) -> None:
        self._min_nodes = min_nodes
        self._timeout = timeout
        self._short_since: dict[str, float] = {}
        self._complete: set[str] = set()  # groups that have had enough nodes at some time
        self._errors: dict[str, int] = {}  # exceptions in a row, by label

    def __contains__(self, group: str) -> bool:
        return group in self._min_nodes

    def silence(self, process: Process, limit: float | None) -> float | None:
        """Returns after how many seconds without a sign of life a node counts as lost.

        That is half of the `heartbeat_timeout` `limit` once the node runs: others may wait for it, and its
        loss costs little. While it starts it may be busy with imports.
        """
        halves = process.unit.group in self and process.state == "running"
        return limit / 2 if limit is not None and halves else limit

    def forgives(self, process: Process) -> bool:
        """Whether the program tolerates the loss of this process.

        An exception is not tolerated while the group has never had enough nodes, nor after too many
        exceptions of one node in a row. It is then most likely an error in the program, which the user should
        see.
        """
        group = process.unit.group
        recurs = self._errors.get(process.unit.label, 0) >= _ERRORS
        return group in self and (process.failure is None or (group in self._complete and not recurs))

    def lost(self, process: Process, now: float) -> None:
        """Counts the exception with which a life of the node ended, if any."""
        label = process.unit.label
        if now - process.born >= LONG_LIFE_S:
            self._errors.pop(label, None)
        if process.failure is not None:
            self._errors[label] = self._errors.get(label, 0) + 1

    def waits_for_place(self, process: Process, now: float) -> bool:
        """Whether the node has no place, in a group that has had enough nodes."""
        waits = process.alive and process.pid is None and now - process.born > _PLACE_S
        return waits and process.unit.group in self._complete

    def shortage(self, processes: Sequence[Process], now: float) -> str | None:
        """Returns what is missing once a group has had too few nodes for too long; else None."""
        for group, least in self._min_nodes.items():
            members = [process for process in processes if process.unit.group == group]
            there = sum(process.state in _THERE for process in members)
            if there >= least:
                self._short_since.pop(group, None)
                self._complete.add(group)
            elif now - self._short_since.setdefault(group, now) >= self._timeout:
                errors = [f"{each.unit.label}: {each.error}" for each in members if each.error]
                return (
                    f"min_nodes[{group!r}]: {there} of {len(members)} nodes are there, expected at least "
                    f"{least}, for {self._timeout:g} s. {'; '.join(errors) or 'None of them has failed.'}"
                )
        return None
