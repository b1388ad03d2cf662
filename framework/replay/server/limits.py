"""What the clients of one replay server may use of its memory."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Hashable

import zmq

# While others wait for room, a client has this long to read an answer, and longer for many bytes.
_PATIENCE_S = 1.0
_SLOW = 1 << 25  # bytes per second


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the messages of a server's clients.

    Attributes:
      max_message_bytes: bytes of one message of a client. Two messages of each client may wait to be read.
      max_unread_bytes: bytes of large answers (from 64 KiB on) that all clients together may leave unread.
        Requests wait for room. Those that wait for a rate limiter may have as many bytes together; one more
        is a `StoreFullError`.

    Raises:
      ValueError: A limit is not positive.
    """

    max_message_bytes: int = 1 << 28
    max_unread_bytes: int = 1 << 29

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
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
        # The client, when the answer was sent, what tells whether it was read, and its size.
        self._answers: collections.deque[tuple[Hashable, float, zmq.MessageTracker, int]] = (
            collections.deque()
        )

    def add(self, client: Hashable, tracker: zmq.MessageTracker, num_bytes: int) -> None:
        """Counts an answer."""
        self._answers.append((client, self._clock(), tracker, num_bytes))

    def has_room(self, num_bytes: int) -> tuple[bool, Hashable]:
        """Returns whether an answer of this size may be made, and a client that has to go first, or None.

        This is the client of the oldest answer, if a slow reader would have read it by now. A single answer
        may be larger than the limit.
        """
        answers = self._answers = collections.deque(each for each in self._answers if not each[2].done)
        if not answers or sum(each[3] for each in answers) + num_bytes <= self._max_bytes:
            return True, None
        client, since, _, size = answers[0]
        return False, client if since <= self._clock() - _PATIENCE_S - size / _SLOW else None
