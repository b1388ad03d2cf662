"""Actors that ask for their actions: of an inference server, or of a policy on a thread beside them.

An `InferenceActor` asks through one of these *ports*, which all look the same to it::

    port.request(observation, first)        # begins to compute; ``first`` bool[B]: an episode begins here
    action, extras = port.answer()          # waits for it
    port.update(wait)                       # newer parameters, if the port has any of its own

- `LocalPort`: the policy in this process, at once or on a thread.
- `ServerPort`: an `InferenceServer` in the same thread or by messages.
- `SharedMemoryPort`: an `InferenceServer` in another process of this machine.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import tree

from framework import core, specs
from framework.actors.inference_server import ANSWER, MAX_ERROR, Connection
from framework.actors.inference_slots import build_nest, write_observation
from framework.environments.base import FIRST
from framework.types import Nest

_LOOK = 0.5  # seconds between two looks at whether the program is being stopped
_LIMIT = 60.0  # seconds without an answer that are an error


class InferenceError(RuntimeError):
    """The inference server could not act, or is gone."""


class Port(abc.ABC):
    """See the module.

    Attributes:
      version: of the parameters of the last answer; -1 if there are none.
    """

    version: int = -1

    @abc.abstractmethod
    def request(self, observation: Nest, first: np.ndarray) -> None:
        """Has actions computed for ``observation``, which stays as it is until the answer is there."""

    @abc.abstractmethod
    def answer(self) -> tuple[Nest, Nest]:
        """``(action, extras)`` of the request, intact until the next one."""

    def update(self, wait: bool = False) -> None:
        """Takes newer parameters over before the next request, now with ``wait``."""
        return None

    def save(self) -> Any:
        """The state of random choices that are made here; None if none are."""
        return None

    def restore(self, state: Any) -> None:
        """Goes on with what ``save`` returned."""
        return None

    def close(self) -> None:
        """Lets go of the server."""
        return None


class InferenceActor(core.Actor, core.Saveable):
    """Acts for ``num_envs`` envs with actions that come from a port.

    It may be told to ask early, when it has seen an observation and before anybody wants the action::

        actor.observe(action, timestep)
        actor.request()                     # the port is at work from here …
        other_loop.step()
        loop.step()                         # … until ``select_action`` waits for it

    Args:
      port: where actions come from.
      adder: takes the experience; None keeps none.
      num_envs: B.
    """

    def __init__(self, port: Port, adder: Any = None, num_envs: int = 1):
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; expected at least 1.")
        self.port = port
        self.num_envs = num_envs
        self._adder = adder
        self._observation: Nest = None
        self._first = np.ones(num_envs, np.bool_)
        self._extras: Nest = ()
        self._requested = False

    def ready(self) -> bool:
        """Whether the next ``observe`` would go through without waiting for room in replay."""
        return self._adder is None or self._adder.ready()

    def observe_first(self, timestep: Any) -> None:
        self.discard()
        self._first[:] = True
        self._observation = timestep.observation
        if self._adder is not None:
            self._adder.add_first(timestep)

    def request(self) -> None:
        """Asks for the actions of the newest observation now; nothing happens if there is none yet."""
        if not self._requested and self._observation is not None:
            self.port.request(self._observation, self._first)
            self._requested = True

    def discard(self) -> None:
        """Lets an answer that nobody will use go by."""
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
        if self._adder is not None:
            self._adder.add(action, next_timestep, self._extras)
        self._observation = next_timestep.observation
        np.equal(next_timestep.step_type, FIRST, out=self._first)

    def update(self, wait: bool = False) -> None:
        self.port.update(wait)

    def save(self) -> Any:
        return {"policy": self.port.save()}

    def restore(self, state: Any) -> None:
        self.discard()
        self.port.restore(state["policy"])
        self._observation = None

    def close(self) -> None:
        """Lets go of the port; an open request is dropped."""
        self._requested = False
        self.port.close()


class LocalPort(Port):
    """A policy in this process, for some of the envs of an actor.

    Several ports may share policy and parameters if they share ``run``, which must do one thing at a time.

    Args:
      policy: acts.
      state: its initial recurrent state for the envs of this port.
      variables: a ``VariableClient``; None leaves parameters alone.
      run: ``run(fn, *args) -> Future``; at once on this thread if None.
    """

    def __init__(
        self,
        policy: core.Policy,
        state: Nest,
        variables: Any = None,
        run: Callable[..., Future] | None = None,
    ):
        self._policy = policy
        self._fresh = self._state = state
        self._variables = variables
        self._run = run or run_now
        self._future: Future | None = None
        self._outdated = False

    def request(self, observation: Nest, first: np.ndarray) -> None:
        outdated, self._outdated = self._outdated, False
        self._future = self._run(self._act, observation, first.copy(), outdated)

    def answer(self) -> tuple[Nest, Nest]:
        assert self._future is not None
        future, self._future = self._future, None
        action, extras, self.version = future.result()
        return action, extras

    def update(self, wait: bool = False) -> None:
        if self._variables is None:
            return
        if wait:
            self.version = self._run(self._update, True).result()
        else:
            self._outdated = True  # on the thread of the policy, before it acts

    def save(self) -> Any:
        return self._run(self._policy.save).result()

    def restore(self, state: Any) -> None:
        self._run(self._policy.restore, state).result()

    def close(self) -> None:
        if self._future is not None:
            self._future.cancel()

    def _update(self, wait: bool) -> int:
        self._variables.update(wait)
        return self._variables.version

    def _act(self, observation: Nest, first: np.ndarray, outdated: bool) -> tuple[Nest, Nest, int]:
        if outdated:
            self._update(False)
        begins = np.flatnonzero(first)
        leaves = tree.flatten(self._state) if len(begins) else []
        if leaves:
            copies = []
            for old, new in zip(leaves, tree.flatten(self._fresh), strict=True):
                # Copied, not written in place: extras may hold the old state.
                old = old.clone() if hasattr(old, "clone") else old.copy()
                old[begins] = new[begins]
                copies.append(old)
            self._state = tree.unflatten_as(self._state, copies)
        action, extras, self._state = self._policy.step(observation, self._state)
        return action, extras, -1 if self._variables is None else self._variables.version


class ServerPort(Port):
    """An `InferenceServer` by calls: in the same thread, or by messages.

    Args:
      server: a client of its node (or the server itself, in tests).
      name: of this client.
      envs, offset, total: see `Slots.connect`.
      timeout: seconds without an answer that are an error.
    """

    def __init__(
        self,
        server: Any,
        name: str,
        envs: int,
        offset: int = 0,
        total: int | None = None,
        timeout: float = _LIMIT,
    ):
        server.connect(name, envs, offset, total, messages=True)
        self._server, self._name, self._timeout = server, name, timeout
        self._futures = getattr(server, "futures", None)
        self._future: Future | None = None

    def request(self, observation: Nest, first: np.ndarray) -> None:
        if self._futures is not None:
            self._future = self._futures.act(self._name, observation, first)
        else:
            self._future = self._server.act.submit((self._name, observation, first), {})

    def answer(self) -> tuple[Nest, Nest]:
        assert self._future is not None
        future, self._future = self._future, None
        try:
            action, extras, self.version = future.result(self._timeout)
        except TimeoutError:
            if future.done():  # with this error of the server's own
                raise
            raise InferenceError(_silent(self._name, self._timeout)) from None
        return action, extras

    def update(self, wait: bool = False) -> None:
        if wait:
            self.version = self._server.update_variables()

    def close(self) -> None:
        self._server.disconnect(self._name)


class SharedMemoryPort(Port):
    """An `InferenceServer` in another process of this machine.

    Args:
      server: a client of its node.
      name: of this client.
      spec: the ``EnvironmentSpec`` of one env.
      connection: what ``server.connect`` answered.
      timeout: seconds without an answer that are an error.
    """

    def __init__(
        self,
        server: Any,
        name: str,
        spec: specs.EnvironmentSpec,
        connection: Connection,
        timeout: float = _LIMIT,
    ):
        import launch
        from framework.replay.shm import attach

        assert connection.socket is not None and connection.columns is not None
        self._server, self._name, self._timeout = server, name, timeout
        rows = slice(connection.begin, connection.end)
        columns = [attach(column.path, column.shape, column.dtype)[rows] for column in connection.columns]
        self._paths = [path for path, _ in specs.leaves(spec.observations)]
        count = len(self._paths)
        self._observations, self._first = columns[:count], columns[count]
        actions = len(tree.flatten(connection.action_nest))
        self._actions = columns[count + 1 : count + 1 + actions]
        self._extras = build_nest(connection.extras_nest, columns[count + 1 + actions :])
        self._action_nest = connection.action_nest
        self._stopped = launch.stop_event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_LOOK)
        self._socket.connect(connection.socket)
        self._socket.sendall(name.encode())
        self._receive()  # so that no request can come before the name

    def request(self, observation: Nest, first: np.ndarray) -> None:
        write_observation(self._observations, self._paths, slice(None), observation)
        self._first[:] = first
        try:
            self._socket.sendall(b"\1")
        except OSError:
            raise self._gone() from None

    def answer(self) -> tuple[Nest, Nest]:
        self._receive()
        # Actions are copied, for environments may keep them; extras go to the adder before the next request.
        return build_nest(self._action_nest, [column.copy() for column in self._actions]), self._extras

    def update(self, wait: bool = False) -> None:
        if wait:
            self.version = self._server.update_variables()

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> None:
        waited = 0.0
        message = b""
        wanted = ANSWER.size
        while len(message) < wanted:
            try:
                part = self._socket.recv(wanted - len(message))
            except TimeoutError:
                waited += _LOOK
                if waited < self._timeout:
                    continue
                raise InferenceError(_silent(self._name, self._timeout)) from None
            except OSError:
                part = b""
            if not part:
                raise self._gone()
            message += part
            if len(message) == ANSWER.size:
                length, self.version = ANSWER.unpack(message)
                wanted += min(length, MAX_ERROR)
        if wanted > ANSWER.size:
            raise InferenceError(
                f"the inference server failed: {message[ANSWER.size :].decode(errors='replace')}"
            )

    def _gone(self) -> Exception:
        import launch

        if self._stopped.is_set():
            return launch.ProgramStopped("the inference server was stopped")
        return InferenceError(
            f"the inference server closed its connection with {self._name!r}: its node has failed or was "
            "restarted; restarts={'actor': n} makes actors connect anew"
        )


def connect(
    server: Any,
    name: str,
    spec: specs.EnvironmentSpec,
    envs: int,
    offset: int = 0,
    total: int | None = None,
    messages: bool = False,
) -> Port:
    """A port of ``server``: through shared memory where its columns can be reached, else by messages."""
    if not messages:
        connection = server.connect(name, envs, offset, total)
        if connection.columns is not None:
            try:
                return SharedMemoryPort(server, name, spec, connection)
            except FileNotFoundError:
                server.disconnect(name)  # another machine, or another file system: by messages
    return ServerPort(server, name, envs, offset, total)


def _silent(name: str, timeout: float) -> str:
    return (
        f"the inference server did not answer {name!r} within {timeout} s; is its node alive, and its batch "
        "not too slow?"
    )


def run_now(function: Callable[..., Any], *args: Any) -> Future:
    """Calls ``function`` and returns a future that is done."""
    future: Future = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future
