"""The state of a process that a program within it shares with the caller: generators, and settings.

Only packages that are imported have any.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from launch.seeds import seed_generators

#: NumPy's reactions to floating-point errors in a new thread.
ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
# By name, what reads a part of the state and what sets it.
_Parts = dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]


def _generators() -> _Parts:
    parts: _Parts = {"random": (random.getstate, random.setstate)}
    if (numpy := sys.modules.get("numpy")) is not None:
        parts["numpy"] = numpy.random.get_state, numpy.random.set_state
    if (torch := sys.modules.get("torch")) is not None:
        parts["torch"] = torch.get_rng_state, torch.set_rng_state
        if torch.cuda.is_initialized():
            parts["torch.cuda"] = torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    return parts


def _settings() -> _Parts:
    parts: _Parts = {}
    if (numpy := sys.modules.get("numpy")) is not None:
        parts["errors"] = numpy.geterr, lambda errors: numpy.seterr(**errors)
    if (torch := sys.modules.get("torch")) is not None:
        parts["threads"] = torch.get_num_threads, torch.set_num_threads
        parts["dtype"] = torch.get_default_dtype, torch.set_default_dtype
    return parts


def _read(parts: _Parts) -> dict[str, Any]:
    return {name: read() for name, (read, _) in parts.items()}


def _write(parts: _Parts, values: dict[str, Any]) -> None:
    for name, value in values.items():
        parts[name][1](value)


def generators() -> dict[str, Any]:
    """Returns the states of the global generators of Python, NumPy and torch."""
    return _read(_generators())


def set_generators(states: dict[str, Any]) -> None:
    """Continues from what `generators` returned."""
    _write(_generators(), states)


@contextlib.contextmanager
def new_thread_settings() -> Iterator[None]:
    """In the `with` block, settings of the calling thread are as in a new thread.

    They are NumPy's reactions to floating-point errors, and torch's gradient mode and default device.
    """
    with contextlib.ExitStack() as stack:
        if (numpy := sys.modules.get("numpy")) is not None:
            stack.enter_context(numpy.errstate(**ERRORS))
        if (torch := sys.modules.get("torch")) is not None:
            stack.enter_context(torch.inference_mode(False))  # It also records gradients.
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
        yield


class OwnState:
    """The state of a program that takes turns with the caller, on the caller's thread.

    A program with a seed has its own generators. One without a seed draws from the caller's.

    Args:
      seed: the seed of the program, or None.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._kept: dict[str, Any] | None = None
        self._is_entered = False

    def _parts(self) -> _Parts:
        return _settings() if self._seed is None else {**_settings(), **_generators()}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The `with` block has the program's state, and the caller's is back after it."""
        if self._is_entered:
            yield
            return
        callers, self._is_entered = _read(self._parts()), True
        try:
            with new_thread_settings():
                if self._kept is not None:
                    _write(self._parts(), self._kept)
                elif self._seed is not None:
                    seed_generators(self._seed)
                try:
                    yield
                finally:
                    self._kept = _read(self._parts())
        finally:
            self._is_entered = False
            _write(self._parts(), callers)


class SharedSettings:
    """Settings of the process while programs run on its threads: the last one gives the caller's back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs = 0
        self._callers: dict[str, Any] = {}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            if not self._programs:
                self._callers = _read(_settings())
            self._programs += 1
        try:
            yield
        finally:
            with self._lock:
                self._programs -= 1
                if not self._programs:
                    _write(_settings(), self._callers)


shared_settings = SharedSettings()
