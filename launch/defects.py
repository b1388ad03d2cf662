"""Mistakes of our own in services that carry out what peers send."""

from __future__ import annotations

import collections
import logging
import threading
import types

_log = logging.getLogger("launch")
_MOST = 3


class Defects:
    """Logs, with their tracebacks, the errors that no message of a peer explains, and counts them.

    One such error costs one message. An error of the same type that is raised at the same line for the third
    time ends the service: it then fails with that traceback, instead of losing one message after the other.
    A lack of memory, disk or files is counted too, and never ends the service: it may pass. It is logged the
    first, second, fourth time and so on, because peers that cause it must not fill the log.

    Attributes:
      count: number of errors.
    """

    def __init__(self) -> None:
        self.count = 0
        self._kinds: collections.Counter[tuple[type, types.CodeType | None, int]] = collections.Counter()
        self._lock = threading.Lock()

    def repeats(self, error: Exception, what: str) -> bool:
        """Logs and counts an error of doing `what`; returns whether it must end the service."""
        code, line, trace = None, 0, error.__traceback__
        while trace is not None:
            code, line, trace = trace.tb_frame.f_code, trace.tb_lineno, trace.tb_next
        with self._lock:
            self.count += 1
            self._kinds[type(error), code, line] += 1
            times = self._kinds[type(error), code, line]
        ends = times >= _MOST and not isinstance(error, MemoryError | OSError)
        if ends or times & (times - 1) == 0:
            end = (
                " again, which ends the service" if ends else f" ({times} times so far)" if times > 1 else ""
            )
            _log.error("%s failed%s", what, end, exc_info=error)
        return ends
