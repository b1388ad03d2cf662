"""The exceptions of `launch`."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from types import TracebackType

from launch.texts import printable

_OURS = ("launch", "framework")  # Packages whose frames a user's error is shown without.
_LIBRARIES = ("<frozen ", *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))


def message_of(error: BaseException) -> str:
    """Returns `str(error)`, or what is wrong with it: an exception's own `__str__` may raise."""
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        return f"got sys.exit({code}), expected a return or an exception. launch.stop() ends a program."
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


def _entries(trace: TracebackType | None) -> tuple[list[TracebackType], list[TracebackType]]:
    """Returns the entries of a traceback, and the entries of other code than ours."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    packages = [str(each.tb_frame.f_globals.get("__name__")).partition(".")[0] for each in entries]
    return entries, [each for each, package in zip(entries, packages, strict=True) if package not in _OURS]


def place_of(error: BaseException) -> str:
    """Returns the user's function in which an exception or its first cause was raised; empty without one."""
    for each in reversed([*_chain(error)]):
        if isinstance(each, RemoteTraceback) and each.place:
            return each.place
        for entry in reversed(_entries(each.__traceback__)[1]):
            code = entry.tb_frame.f_code
            if not code.co_filename.startswith(_LIBRARIES):
                name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short name.
                return f"{name} ({code.co_filename}, line {entry.tb_lineno})"
    return ""


def hide_our_frames(error: BaseException) -> None:
    """Leaves the frames of other code in the tracebacks of an exception and its causes.

    If there are none, the innermost frame of each traceback stays.
    """
    chain = [*_chain(error)]
    entries = [_entries(each.__traceback__) for each in chain]
    is_ours = not any(theirs for _, theirs in entries)
    for each, (every, theirs) in zip(chain, entries, strict=True):
        trace = None
        for entry in reversed(every[-1:] if is_ours else theirs):
            trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
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
    place = place_of(error)
    hide_our_frames(error)
    return {
        "kind": type(error).__name__,
        "message": message_of(error),
        "traceback": text,
        "frames": frames_of(error),
        "place": place,
    }


class MalformedMessage(ValueError):
    """A peer sent something that is not a message of the protocol."""


class LaunchError(RuntimeError):
    """Base class of the errors that `launch` raises."""


def without_exit(error: BaseException, what: str = "a call") -> BaseException:
    """Returns the error of `what`, with another one in place of a `SystemExit`, which would end a thread."""
    if not isinstance(error, SystemExit):
        return error
    failure = LaunchError(f"{place_of(error) or what}: {message_of(error)}")
    failure.__cause__ = error
    return failure


class NodeError(LaunchError):
    """A node failed, and its program ended because of it.

    The `__cause__` is the node's exception with its own type, or a `RemoteError` if it cannot be unpickled in
    this process.

    Attributes:
      node: label of the node, e.g. `"actor-3"`.
      kind: name of the exception's type, or the way in which the process ended.
      traceback: the whole traceback of the node's process as text; empty when the process was killed.
      frames: the same without the frames of this project, and without `message`; see `frames_of`.
      place: the user's function that raised the error, with its file and line; empty without one.
    """

    def __init__(
        self,
        node: str,
        kind: str,
        message: str,
        traceback: str = "",
        log_tail: str = "",
        frames: str = "",
        place: str = "",
    ) -> None:
        self.node = node
        self.kind = kind
        self.traceback = traceback
        self.frames = frames
        self.place = place
        text = f"{place and f'{place}: '}node {node!r} failed with {kind}: {message}"
        if log_tail:
            text += f"\n\nLast lines of the log of node {node!r}:\n{log_tail.rstrip()}"
        super().__init__(printable(text))


class RemoteTraceback(Exception):
    """The `__cause__` of an exception that another process raised: its traceback there, as text.

    Attributes:
      place: see `place_of`.
    """

    def __init__(self, node: str, text: str, place: str = "", what: str = "node") -> None:
        self.node = node
        self.text = text
        self.place = place
        super().__init__(printable(f"raised in {what} {node!r}:\n{text.rstrip()}"))


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
