"""The policy of actors whose actions come from an `InferenceServer`."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # Another class in Python 3.10.
from typing import Any

import numpy as np

import launch
from framework import core
from framework.actors.inference_lines import DirectLine, no_answer
from framework.actors.inference_lines import InferenceError as InferenceError
from framework.types import Nest

_LIMIT_S = 60.0  # Seconds without an answer after which the request fails.


class ServerPort(core.Policy):
    """A policy that an `InferenceServer` in this process or another computes.

    The state of an env, bool, is whether an episode begins with the next observation. Actions can be
    requested as soon as there is the observation, before the actor needs the actions:

    ```python
    port.request(observation, state)                      # the server computes from here …
    action, extras, state = port.step(observation, state) # … until here
    ```

    Args:
      server: the server, or a client of its node.
      name: name of this client.
      envs: see `Slots.connect`.
      offset: see `Slots.connect`.
      total: see `Slots.connect`.
      timeout: seconds without an answer after which a request fails.

    Attributes:
      version: version of the parameters of the last answer; -1 without parameters.
    """

    version: int = -1

    def __init__(
        self,
        server: Any,
        name: str,
        envs: int,
        offset: int = 0,
        total: int | None = None,
        timeout: float = _LIMIT_S,
    ):
        connection = server.connect(name, envs, offset, total)
        self._server, self._name, self._timeout = server, name, timeout
        self._number, self._calls, self._line = connection.number, server.futures, None
        if connection.folder is not None:
            with contextlib.suppress(OSError):  # The server is on another machine.
                self._calls = self._line = DirectLine(connection, name, timeout)
        self._future: Future | DirectLine | None = None

    def initial_state(self, batch_size: int) -> np.ndarray:
        """True for each env. Waits for the answer of an open request and drops it."""
        if self._future is not None:
            self.answer()
        return np.ones(batch_size, np.bool_)

    def step(self, observation: Nest, state: np.ndarray) -> tuple[Nest, Nest, np.ndarray]:
        self.request(observation, state)
        return *self.answer(), np.zeros_like(state)

    def request(self, observation: Nest, state: np.ndarray) -> None:
        """Starts to compute actions for `observation`, which must not change before the answer.

        Does nothing if there is an open request.
        """
        if self._future is None:
            self._future = self._calls.act(self._number, observation, state)

    def answer(self) -> tuple[Nest, Nest]:
        """Waits for `(action, extras)` of the request. They are valid until the next request."""
        assert self._future is not None
        future, self._future = self._future, None
        try:
            action, extras, self.version = future.result(self._timeout)
        except (TimeoutError, FutureTimeout):
            if future.done():  # The server itself raised this error.
                raise
            raise no_answer(self._name, self._timeout) from None
        return action, extras

    def update(self, wait: bool = False) -> None:
        """With `wait`, makes the server pull newer parameters now. Otherwise the server decides when."""
        if wait:
            self.version = self._server.update_variables()

    def close(self) -> None:
        """Disconnects from the server, unless the program stops: it then waits for no client, or is gone."""
        if self._line is not None:
            self._line.close()
        if not launch.stop_event().is_set():
            self._server.disconnect(self._name)
