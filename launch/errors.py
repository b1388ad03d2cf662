"""The exceptions of `launch`."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import TracebackType

from launch.texts import printable

_OURS = ("launch", "framework")  # Packages whose frames a user's error is shown without.


def message_of(error: BaseException) -> str:
    """Returns `str(error)`, or what is wrong with it: an exception's own `__str__` may raise."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its __str__ raised {type(failure).__name__}>"


def _says(error: BaseException) -> str:
    """Returns an exception's last lines in a traceback, also if Python cannot print it."""
    try:
        return "".join(traceback.format_exception_only(type(error), error))
    except Exception:  # The attributes of a SyntaxError may be of any type.
        return f"{type(error).__name__}: {message_of(error)}\n"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception and those that led to it, the first of them last."""
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    for entry in reversed(entries):
        if str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _OURS:
            trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def hide_our_frames(error: BaseException) -> None:
    """Leaves the frames of other code in the tracebacks of an exception and its causes, if there are any."""
    kept = [(each, _without_ours(each.__traceback__)) for each in _chain(error)]
    if any(trace is not None for _, trace in kept):
        for each, trace in kept:
            # The class of an exception may refuse changes, as a frozen dataclass does.
            BaseException.with_traceback(each, trace)


def frames_of(error: BaseException) -> str:
    """Returns where an exception and its causes were raised, in the order of time.

    Those without a traceback are left out. The message of the last exception, `error`, is left out, too.
    """
    parts = []
    for each in reversed([*_chain(error)]):
        frames = "".join(traceback.format_tb(each.__traceback__))
        says = "" if each is error else _says(each)
        if frames or isinstance(each, RemoteTraceback):
            parts.append(frames + says)
    return "\n".join(parts).rstrip()


def describe(error: BaseException) -> dict[str, str]:
    """Returns an exception as texts, the arguments of `NodeError`, and hides this project's frames in it."""
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:
        text = f"{frames_of(error)}\n{_says(error)}"
    hide_our_frames(error)
    return {
        "kind": type(error).__name__,
        "message": message_of(error),
        "traceback": text,
        "frames": frames_of(error),
    }


class MalformedMessage(ValueError):
    """A peer sent something that is not a message of the protocol."""


class LaunchError(RuntimeError):
    """Base class of the errors that `launch` raises."""


class NodeError(LaunchError):
    """A node failed, and its program ended because of it.

    The `__cause__` is the node's exception with its own type, or a `RemoteError` if it cannot be unpickled in
    this process.

    Attributes:
      node: label of the node, e.g. `"actor-3"`.
      kind: name of the exception's type, or the way in which the process ended.
      traceback: the whole traceback of the node's process as text; empty when the process was killed.
      frames: the same without the frames of this project, and without `message`; see `frames_of`.
    """

    def __init__(
        self, node: str, kind: str, message: str, traceback: str = "", log_tail: str = "", frames: str = ""
    ) -> None:
        self.node = node
        self.kind = kind
        self.traceback = traceback
        self.frames = frames
        text = f"node {node!r} failed with {kind}: {message}"
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
