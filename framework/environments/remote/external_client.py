"""A client of `external:` environments, for applications in Python: docs/external_clients.md.

This file imports the standard library only: copy it to where the application is.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from typing import Any


def keep_alive(connection: socket.socket) -> None:
    """Makes a TCP connection fail within about a minute after the other host has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Seconds idle, seconds between probes, number of probes; milliseconds that sent data may wait.
    options = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60000}
    for name, value in options.items():
        option = getattr(socket, name, None)  # Some platforms have only a few.
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class ExternalClient:
    """Asks a run for actions and reports rewards.

    ```python
    with ExternalClient("HOST:5556", token, {"shape": [4], "dtype": "float32"}, action) as client:
        client.start_episode()
        action = client.get_action(observation)
        client.log_reward(1.0)
        client.end_episode(observation)
    ```

    Args:
      address: `HOST:PORT` of the run's actors.
      token: what the run's file `clients.token` holds.
      observation, action: their specs, such as `{"shape": [4], "dtype": "float32"}` and
        `{"shape": [], "dtype": "int64", "num_values": 2}`.
      evaluation: whether the episodes are for the evaluator.
      timeout: seconds to wait for an actor that needs a client.
      tls: for runs with a certificate.

    Raises:
      ConnectionError: No actor needs a client, or the connection has ended. Make a new client.
      socket.gaierror: The host is unknown.
      ssl.SSLCertVerificationError: The certificate does not fit `tls`.
      ValueError: The run refused a message, and says why.
    """

    def __init__(
        self,
        address: str,
        token: str,
        observation: Any,
        action: Any,
        evaluation: bool = False,
        timeout: float = 60.0,
        tls: ssl.SSLContext | None = None,
    ):
        host, _, port = address.rpartition(":")
        hello = {"protocol": 1, "token": token, "observation": observation, "action": action}
        deadline = time.monotonic() + timeout
        while True:
            failure = None
            try:
                if self._connect(host, int(port), tls, {**hello, "evaluation": evaluation}):
                    break
            except (ssl.SSLCertVerificationError, socket.gaierror):
                raise
            except OSError as error:
                failure = error  # No actor listens now, or it began to leave.
            if time.monotonic() > deadline:
                raise ConnectionError(f"{address}: no actor needs a client after {timeout:g} s.") from failure
            time.sleep(0.1)
        self._socket.settimeout(None)

    def _connect(self, host: str, port: int, tls: ssl.SSLContext | None, hello: dict[str, Any]) -> bool:
        """Whether an actor takes the client; otherwise the connection is closed."""
        with contextlib.ExitStack() as opened:
            self._socket = opened.enter_context(socket.create_connection((host, port), timeout=10.0))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(self._socket)
            if tls is not None:
                self._socket = opened.enter_context(tls.wrap_socket(self._socket, server_hostname=host))
            self._lines = opened.enter_context(self._socket.makefile("rb"))
            self._send("hello", **hello)
            if self._answer()["type"] != "welcome":
                return False
            opened.pop_all()
        return True

    def start_episode(self) -> None:
        self._send("start_episode")

    def get_action(self, observation: Any) -> Any:
        """Waits for the action for `observation`: numbers in nested lists, or a dict or list of those."""
        self._send("get_action", observation=observation)
        return self._answer()["action"]

    def log_reward(self, reward: float) -> None:
        """Adds to the reward of the last action."""
        self._send("log_reward", reward=float(reward))

    def end_episode(self, observation: Any, truncated: bool = False) -> None:
        """Ends the episode with its last observation, by a time limit with `truncated`."""
        self._send("end_episode", observation=observation, truncated=truncated)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> ExternalClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, kind: str, **message: Any) -> None:
        try:
            self._socket.sendall(json.dumps({"type": kind, **message}).encode() + b"\n")
        except OSError:
            self._answer()  # Raises the reason, if the run refused an earlier message.
            raise

    def _answer(self) -> Any:
        line = self._lines.readline()
        if not line:
            raise ConnectionError("The run has ended the connection.")
        answer = json.loads(line)
        if answer["type"] == "error":
            raise ValueError(answer["message"])
        return answer
