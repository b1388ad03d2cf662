"""Actors whose actions come from an `InferenceServer`.

An `InferenceActor` requests actions through a `ServerPort`.

```python
port.request(observation, first)        # starts the computation; `first` bool[B]: an episode begins here
action, extras = port.answer()          # waits for the result
```
"""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # Another class in Python 3.10.
from typing import Any

import numpy as np

from framework import core
from framework.foreign import copies, is_foreign
from framework.types import FIRST, Nest

_LIMIT_S = 60.0  # Seconds without an answer after which the request fails.


class InferenceError(RuntimeError):
    """The inference server does not answer."""


class InferenceActor(core.Actor):
    """Acts for `num_envs` envs with actions from a port.

    It can request actions as soon as it has the observation, before the loop needs the actions:

    ```python
    actor.observe(action, timestep)
    actor.request()                     # the port computes from here …
    other_loop.step()
    loop.step()                         # … until `select_action` waits for it
    ```

    Args:
      port: the source of actions.
      adder: takes the experience. None discards it. The attribute may be replaced before `observe_first`.
      num_envs: number of envs, B.
    """

    def __init__(self, port: ServerPort, adder: Any = None, num_envs: int = 1):
        self.port = port
        self.num_envs = num_envs
        self.adder = adder
        self._copies = False  # Whether it gets copies, because it is of another package.
        self._observation: Nest = None
        self._first = np.ones(num_envs, np.bool_)
        self._extras: Nest = ()
        self._requested = False

    def observe_first(self, timestep: Any) -> None:
        self.discard()
        self._first[:] = True
        self._observation = timestep.observation
        if self.adder is not None:
            self._copies = is_foreign(self.adder)
            self.adder.add_first(copies(timestep) if self._copies else timestep)

    def request(self) -> None:
        """Requests the actions for the newest observation now. Does nothing without an observation."""
        if not self._requested and self._observation is not None:
            self.port.request(self._observation, self._first)
            self._requested = True

    def discard(self) -> None:
        """Waits for the answer of an open request and drops it."""
        if self._requested:
            self._requested = False
            self.port.answer()

    def select_action(self, observation: Nest) -> Nest:
        if self._observation is None:
            raise RuntimeError("select_action() came before observe_first(); give it the first time step.")
        if not self._requested:
            self._observation = observation
            self.request()
        self._requested = False
        action, self._extras = self.port.answer()
        self._first[:] = False
        return action

    def observe(self, action: Nest, next_timestep: Any) -> None:
        if self.adder is not None:
            given = action, next_timestep, self._extras
            self.adder.add(*(copies(given) if self._copies else given))
        self._observation = next_timestep.observation
        np.equal(next_timestep.step_type, FIRST, out=self._first)

    def update(self, wait: bool = False) -> None:
        self.port.update(wait)

    def close(self) -> None:
        """Closes the port and drops an open request."""
        self._requested = False
        self.port.close()


class ServerPort:
    """A connection to an `InferenceServer` in this process or another.

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
        server.connect(name, envs, offset, total)
        self._server, self._name, self._timeout = server, name, timeout
        self._future: Future | None = None

    def request(self, observation: Nest, first: np.ndarray) -> None:
        """Starts to compute actions for `observation`, which must not change before the answer."""
        self._future = self._server.futures.act(self._name, observation, first)

    def answer(self) -> tuple[Nest, Nest]:
        """Waits for `(action, extras)` of the request. They are valid until the next request."""
        assert self._future is not None
        future, self._future = self._future, None
        try:
            action, extras, self.version = future.result(self._timeout)
        except (TimeoutError, FutureTimeout):
            if future.done():  # The server itself raised this error.
                raise
            raise InferenceError(
                f"inference server: got no answer for {self._name!r} within {self._timeout} s. Check that "
                "its node is alive and that its batches are not too slow."
            ) from None
        return action, extras

    def update(self, wait: bool = False) -> None:
        """With `wait`, makes the server pull newer parameters now. Otherwise the server decides when."""
        if wait:
            self.version = self._server.update_variables()

    def close(self) -> None:
        """Disconnects from the server."""
        self._server.disconnect(self._name)
