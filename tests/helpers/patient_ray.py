"""Ray started on a busy machine: it gives its own processes 30 s, and no setting of it changes that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_ATTEMPTS = 5


def started(start: Callable[[], T], clean: Callable[[], object] = lambda: None) -> T:
    """Returns `start()`. If Ray gave up waiting for its own processes, calls `clean` and tries again."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            clean()
    return start()
