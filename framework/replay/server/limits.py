"""What the clients of one replay server may use of its memory."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any

import zmq

# Large answers that a client may leave unread, whatever their size. ZeroMQ reports late what a client has
# read, so that a busy client may appear to have several.
_MAX_UNREAD = 4
# While others wait for room, a client has this long to read, and longer for many bytes.
_PATIENCE_S = 1.0
_SLOW = 1 << 25  # bytes per second


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one client, and of all clients of a server together.

    Attributes:
      max_message_bytes: bytes of one message of a client. Without keys, all messages that are arriving may
        take four times as much together; see `Intake`.
      max_leased_bytes: bytes of rows that one client may hold without having released them; all together may
        hold one and a half times as much. None is half of `max_bytes`, or of the machine's shared memory, for
        a server without keys, and no limit with keys.
      max_unread_bytes: bytes of large answers (from 64 KiB on) that all clients together may leave unread.
        One client may leave a quarter of them in more than four answers. Requests wait for room.

    Raises:
      ValueError: A limit is not positive.
    """

    max_message_bytes: int = 1 << 28
    max_leased_bytes: int | None = None
    max_unread_bytes: int = 1 << 29

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(f"{field.name}: got {value}, expected a positive number of bytes.")


class Unread:
    """The large answers that clients may not have read yet.

    Args:
      max_bytes: see `Limits.max_unread_bytes`.
      clock: seconds.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        # By client, when each answer was sent, what tells whether it was read, and its size.
        self._answers: dict[Hashable, collections.deque[tuple[float, zmq.MessageTracker, int]]] = {}

    def add(self, client: Hashable, tracker: zmq.MessageTracker, num_bytes: int) -> bool:
        """Counts an answer; returns whether the client may stay: it does not leave too much unread."""
        mine = self._answers.setdefault(client, collections.deque())
        mine.append((self._clock(), tracker, num_bytes))
        unread = self._unread_of(client)
        return len(mine) <= _MAX_UNREAD or unread <= self._max_bytes // 4

    def has_room(self, num_bytes: int) -> tuple[bool, list[Any]]:
        """Returns whether an answer of this size may be made, and the clients that have to go first.

        Those go first that have not read for the longest time, if a slow reader would be done by now. A
        single answer may be larger than the limit. Small ones have a quarter more, and need not wait.
        """
        unread = {client: self._unread_of(client) for client in list(self._answers)}
        most = self._max_bytes * (5 if num_bytes <= self._max_bytes // 32 else 4) // 4
        over = sum(unread.values()) + min(num_bytes, self._max_bytes) - most
        if over <= 0:
            return True, []
        now, gone = self._clock(), []
        for client in sorted(self._answers, key=lambda each: self._answers[each][0][0]):
            patience = _PATIENCE_S + unread[client] / _SLOW
            if over > 0 and self._answers[client][0][0] <= now - patience:
                gone.append(client)
                over -= unread[client]
        return False, gone

    def _unread_of(self, client: Hashable) -> int:
        """Returns the bytes that a client has not read yet, of each answer at most the limit."""
        answers = self._answers[client]
        while answers and answers[0][1].done:
            answers.popleft()
        if not answers:
            del self._answers[client]
        return sum(min(num_bytes, self._max_bytes) for _, _, num_bytes in answers)
