"""The object of a `launch.CacherNode`."""

from __future__ import annotations

import functools
import pickle
import threading
import time
from concurrent.futures import Future
from typing import Any

from launch import context
from launch.futures import fulfil
from launch.handles import Methods


class Cacher(Methods):
    """Passes calls to a client and keeps the answers for `refresh_interval` seconds.

    Equal calls during a call in progress share its answer. Failed calls are not kept.
    """

    def __init__(self, client: Any, refresh_interval: float) -> None:
        super().__init__(self._ask, None)
        self._client = client
        self._interval = refresh_interval
        self._lock = threading.Lock()
        self._answers: dict[Any, tuple[float, Future]] = {}
        self._timeless = context.get_node_context().engine == "serial"

    def __getattr__(self, name: str) -> Any:
        if name in ("run", "step", "ready", "close"):
            raise AttributeError(name)
        return super().__getattr__(name)

    def _ask(self, name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
        if self._timeless:
            return getattr(self._client, name)(*args, **kwargs)
        key = pickle.dumps((name, args, sorted(kwargs.items())))
        with self._lock:
            now = time.monotonic()
            self._answers = {
                k: (asked, answer)
                for k, (asked, answer) in self._answers.items()
                if not answer.done() or (now - asked < self._interval and answer.exception() is None)
            }
            known = self._answers.get(key)
            if known is None:
                future: Future = Future()
                self._answers[key] = (now, future)
        if known is not None:
            return known[1].result()
        fulfil(future, functools.partial(getattr(self._client, name), *args, **kwargs))
        return future.result()
