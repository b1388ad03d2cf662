"""The exceptions of `launch`."""

from __future__ import annotations

from launch.texts import printable


def message_of(error: BaseException) -> str:
    """Returns `str(error)`, or what is wrong with it: an exception's own `__str__` may raise."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its __str__ raised {type(failure).__name__}>"


class LaunchError(RuntimeError):
    """Base class of the errors that `launch` raises."""


class NodeError(LaunchError):
    """A node failed, and its program ended because of it.

    The `__cause__` is the node's exception with its own type, or a `RemoteError` if it cannot be unpickled in
    this process.

    Attributes:
      node: label of the node, e.g. `"actor-3"`.
      kind: name of the exception's type, or the way in which the process ended.
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
        super().__init__(printable(text))


class RemoteTraceback(Exception):
    """The `__cause__` of an exception that another process raised: its traceback there, as text."""

    def __init__(self, node: str, text: str) -> None:
        self.node = node
        self.text = text
        super().__init__(printable(f"raised in node {node!r}:\n{text.rstrip()}"))


class RemoteError(LaunchError):
    """A call failed in another node with an exception that cannot be rebuilt in this process.

    Attributes:
      kind: name of the exception's type.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(printable(f"{kind}: {message}"))


class CallTimeout(LaunchError, TimeoutError):
    """A call was not answered within its timeout. The node may still carry it out."""


class CallLost(LaunchError, ConnectionError):
    """The node was restarted, or dropped the connection, while it had the call.

    The call may have been carried out.
    """


class ClientClosed(LaunchError):
    """The client was closed while a call was waiting."""


class ProgramStopped(LaunchError):
    """A wait ended because the program is stopping.

    A node whose `run()` ends with this (or a subclass) after the stop began has ended normally.
    """


class DeadlockError(LaunchError):
    """On the serial engine, no worker is ready and none can become ready."""


class StopTimeoutWarning(RuntimeWarning):
    """Nodes did not end within `stop_timeout` and were killed."""
