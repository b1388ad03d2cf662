"""What can go wrong in a program, by name."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """Anything that `launch` itself reports."""


class NodeError(LaunchError):
    """A node failed and its program ended because of it.

    The exception of the node is the `__cause__` where it could be brought over, with its own type.

    Attributes:
      node: label of the node, e.g. `"actor-3"`.
      kind: name of the exception's type, or what happened to the process.
      traceback: the traceback of the node's process as text; empty when the process was killed.
    """

    def __init__(self, node: str, kind: str, message: str, traceback: str = "", log_tail: str = "") -> None:
        self.node = node
        self.kind = kind
        self.traceback = traceback
        text = f"node {node!r} failed with {kind}: {message}"
        if traceback:
            text += f"\n\nTraceback of node {node!r}:\n{traceback.rstrip()}"
        if log_tail:
            text += f"\n\nLast lines of the log of node {node!r}:\n{log_tail.rstrip()}"
        super().__init__(text)


class RemoteTraceback(Exception):
    """The `__cause__` of an exception that another process raised: the traceback over there, as text."""

    def __init__(self, node: str, text: str) -> None:
        self.node = node
        self.text = text
        super().__init__(f"raised in node {node!r}:\n{text.rstrip()}")


class RemoteError(LaunchError):
    """A call failed in another node with an exception that cannot be rebuilt here.

    Attributes:
      kind: name of the exception's type over there.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {message}")


class CallTimeout(LaunchError, TimeoutError):
    """A call was not answered within its time. It may still be carried out over there."""


class CallLost(LaunchError, ConnectionError):
    """The node was restarted, or dropped the connection, while it had the call.

    The call may have been carried out.
    """


class ClientClosed(LaunchError):
    """The client was closed while a call was waiting."""


class ProgramStopped(LaunchError):
    """A wait was ended because the program is stopping.

    A node whose `run()` ends with this (or a subclass) after the stop began has ended normally.
    """


class DeadlockError(LaunchError):
    """The serial engine found that no worker is ready and none can become so."""


class StopTimeoutWarning(RuntimeWarning):
    """Nodes did not end within `stop_timeout` and were ended by force."""
