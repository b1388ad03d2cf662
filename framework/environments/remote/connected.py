"""Environments in other processes that connect to this one: what `remote:` and `external:` share."""

from __future__ import annotations

import abc
import logging
import socket
import time
from collections.abc import Sequence

import dm_env
import numpy as np
import tree

import launch
from framework import nest as nests
from framework import specs
from framework.environments.base import BatchedEnvironment, EnvironmentFault
from framework.environments.remote.environment_server import UnreadableMessage
from framework.environments.remote.spec_data import parse_environment_spec
from framework.environments.rows import TimeStepChecker, time_step_spec
from framework.types import Nest
from launch.defects import Defects
from launch.texts import printable

_LOG = logging.getLogger(__name__)
_POLL_S = 0.5  # between two looks at whether the program stops and peers are still there
_PATIENCE_SECONDS = 3.0  # before a message says what is missing


class ConnectedEnvironment(BatchedEnvironment):
    """B envs of peers that connect on their own. The constructor waits until all are connected.

    The environments of several actors on one machine listen at one address (`SO_REUSEPORT`). A peer reaches
    one of them, which admits it only while envs are missing; otherwise the peer tries again. A peer that is
    lost takes its envs with it. The step that notices the loss waits for other peers, whose envs begin with
    FIRST in mid-episode.

    Args:
      name: name of the environment, for errors.
      address: `tcp://INTERFACE:PORT`.
      num_envs: B.
      timeout: seconds that a step may wait for envs to connect and for their answers.

    Attributes:
      malformed: messages that did not fit the protocol or the specs; each ends the connection of its peer.
      defects: messages that failed with an error of this package. Each ends the connection of its peer, and
        one that repeats is raised; see `launch.defects`.

    Raises:
      EnvironmentFault: There are too few envs after `timeout` seconds.
    """

    #: How to start a peer, for messages.
    how_to_connect: str

    def __init__(self, name: str, address: str, num_envs: int, timeout: float):
        self.name, self.num_envs, self._timeout = name, num_envs, timeout
        self._host, self._port = parse_address(name, address)
        self.malformed, self._closed = 0, False
        self._defects = Defects()
        self._is_listening = False
        self._vacant = np.ones(num_envs, np.bool_)
        self._missing = np.ones(num_envs, np.bool_)  # Envs that wait for their next time step.
        self._spec_data: object = None
        self._columns: list[np.ndarray] | None = None  # the last time step, one array per leaf
        self._stopped = launch.stop_event()
        try:
            self._gather(self._vacant)
        except BaseException:
            self.close()
            raise

    @property
    def defects(self) -> int:
        return self._defects.count

    def reset(self) -> dm_env.TimeStep:
        return self._exchange(None)

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._exchange(self._check.action(action))

    def _exchange(self, actions: Sequence[np.ndarray] | None) -> dm_env.TimeStep:
        """Steps all envs, or resets them if `actions` is None."""
        if self._closed:
            raise EnvironmentFault(f"{self.name}: it is closed. Make a new environment.")
        self._columns = columns = [np.empty((self.num_envs, *shape), dtype) for dtype, shape in self._layout]
        self._missing[:] = True
        try:
            self._request(actions)
            self._gather(self._missing)
        except BaseException:
            self._abandon()
            raise
        return self._check(self._build(columns))

    def close(self) -> None:
        self._closed = True

    def _set_spec(self, data: object, spec: specs.EnvironmentSpec) -> None:
        """Takes the specs of the first peer, with which all others must agree."""
        self._spec_data, self.spec = data, spec
        template = time_step_spec(spec)
        self._layout = [(leaf.dtype, leaf.shape) for leaf in tree.flatten(template)]
        self._build = nests.unflattener(template)
        self._check = TimeStepChecker(self.name, spec, self.num_envs)

    def _gather(self, missing: np.ndarray) -> None:
        """Receives until no entry of `missing` is set."""
        begun = told = time.monotonic()
        while np.count_nonzero(missing):
            wanted = bool(np.count_nonzero(self._vacant))
            if wanted != self._is_listening:
                self._listen() if wanted else self._stop_listening()
            self._receive(_POLL_S)
            now = time.monotonic()
            if self._stopped.is_set():
                raise launch.ProgramStopped(f"{self.name}: the program stops.")
            if now > begun + self._timeout:
                raise EnvironmentFault(self._describe(missing))
            if now > told + _PATIENCE_SECONDS and np.count_nonzero(self._vacant):
                told = now + 60.0
                _LOG.warning(
                    "%s: %d of %d envs are connected, waiting %g s for the others. %s",
                    *(self.name, np.count_nonzero(~self._vacant), self.num_envs, self._timeout),
                    self.how_to_connect,
                )
        if self._is_listening and not np.count_nonzero(self._vacant):
            self._stop_listening()

    def _describe(self, missing: np.ndarray) -> str:
        """Which envs are missing, why, and what to do."""
        text = (
            f"{self.name}: got {np.count_nonzero(~missing)} of {self.num_envs} envs in {self._timeout:g} s."
        )
        vacant, silent = np.flatnonzero(missing & self._vacant), np.flatnonzero(missing & ~self._vacant)
        if len(silent):
            text += (
                f" Envs {_name(silent)} are connected and silent. Check their peers, or give a larger "
                "timeout=SECONDS among the options of the environment."
            )
        if len(vacant):
            text += f" Envs {_name(vacant)} are not connected. {self.how_to_connect}"
        return text

    def _refuse_message(self, error: Exception) -> str:
        """Counts an error of a peer's message and returns the text for the peer; raises a repeated defect."""
        if isinstance(error, UnreadableMessage):
            self.malformed += 1
            if self.malformed & (self.malformed - 1) == 0:  # the 1st, 2nd, 4th …: a flood fills no log
                text = "%s: ended the connection of a peer (%d so far): %s"
                _LOG.warning(text, self.name, self.malformed, printable(str(error)))
            return str(error)
        if self._defects.repeats(error, f"{self.name}: a message of a peer"):
            raise error
        return "The run failed on this message. Its log has the error."

    def _parse_spec(self, data: object) -> specs.EnvironmentSpec:
        try:
            return parse_environment_spec(data)
        except ValueError as error:
            raise UnreadableMessage(str(error)) from None

    def _put(self, envs: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
        """Takes the time step of some envs."""
        for column, leaf in zip(self._columns or (), leaves, strict=True):
            column[envs] = leaf
        self._missing[envs] = False

    def _open_port(self) -> socket.socket:
        """A listening socket, which shares the port with other environments' sockets."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.setblocking(False)
            listener.bind((self._host, self._port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise OSError(
                error.errno, f"{self.name}: cannot listen at {self._host}:{self._port}: {error.strerror}."
            ) from error
        return listener

    @abc.abstractmethod
    def _listen(self) -> None:
        """Begins to admit peers, and sets `_is_listening`."""

    @abc.abstractmethod
    def _stop_listening(self) -> None:
        """Stops admitting peers, and clears `_is_listening`."""

    @abc.abstractmethod
    def _request(self, actions: Sequence[np.ndarray] | None) -> None:
        """Gives the peers their actions; None resets their envs."""

    def _abandon(self) -> None:
        """Cleans up after a failed request: its late answers must not pass for answers to the next one."""

    @abc.abstractmethod
    def _receive(self, timeout: float) -> None:
        """Takes what peers send within `timeout` seconds: new envs and time steps; notices lost peers."""


def _name(envs: np.ndarray) -> str:
    return ", ".join(map(str, envs[:16])) + (" and others" if len(envs) > 16 else "")


def require_file(name: str, option: str, path: str, peers: str) -> None:
    """Raises ValueError if the option that names the file of a secret is empty."""
    if not path:
        raise ValueError(
            f"{name}: got no {option}, expected {option}=FILE among the options of the environment. The file "
            f"is created if it does not exist, and {peers} need it. A run with a directory has its own."
        )


def parse_address(name: str, address: str) -> tuple[str, int]:
    """The interface, as a number, and the port of `tcp://INTERFACE:PORT`."""
    transport, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    try:
        if transport != "tcp" or not port.isdigit():
            raise ValueError(address)
        return socket.gethostbyname(host), int(port)
    except (OSError, ValueError):
        raise ValueError(
            f"{name}: got the address {address!r}, expected tcp://INTERFACE:PORT, such as "
            "tcp://127.0.0.1:5555, or tcp://0.0.0.0:5555 for all interfaces."
        ) from None
