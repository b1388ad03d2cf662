"""Nodes: the units of a program. A node holds a constructor; the node's own process calls it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from launch import context
from launch.caching import Cacher
from launch.errors import LaunchError
from launch.handles import Handle, replace_handles, timeout_seconds
from launch.texts import check_known

_ids = itertools.count(1)


class ProgramNode:
    """The base class of nodes.

    Attributes:
      node_id: number that is unique in the process that builds programs.
      serves: `"courier"` if the node serves methods, `"server"` for a `ServerNode`, None if it serves
        nothing.
    """

    serves: ClassVar[str | None] = None
    is_function: ClassVar[bool] = False  # whether `call` does the node's work rather than construct an object
    first_argument: ClassVar[str] = "constructor"  # its name; it may be given by position or by this name
    client_options: Any = None  # of `courier_client_kwargs`; see `ServerNode`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fn, *rest = args or (kwargs.pop(self.first_argument, None),)
        if not callable(fn):
            raise TypeError(f"{type(self).__name__}({self.first_argument}): got {fn!r}, expected a callable.")
        self.node_id = next(_ids)
        self._fn = fn
        self._args = tuple(rest)
        self._kwargs = kwargs
        self._claimed = False
        self._run = True

    @property
    def description(self) -> str:
        fn = getattr(self._fn, "func", self._fn)  # of a partial
        return f"{type(self).__name__}({getattr(fn, '__name__', type(fn).__name__)})"

    def create_handle(self) -> Handle:
        """Returns the handle of this node, as `add_node` does."""
        return Handle(self.node_id, self.description)

    def parts(self) -> Sequence[ProgramNode]:
        """Returns the nodes inside a colocation; none for other nodes."""
        return ()

    def handles(self) -> list[Handle]:
        """Returns the handles in the arguments: the nodes that this node can call."""
        found: list[Handle] = []
        replace_handles((self._args, self._kwargs), lambda handle: found.extend(handle.members()))
        return found

    def claim(self) -> None:
        """Marks the node as a member of a program."""
        if self._claimed:
            raise ValueError(f"{self.description} is already in a program. Create a new node.")
        self._claimed = True

    def copy(self) -> ProgramNode:
        """Returns a node with the same constructor and arguments that is in no program."""
        other = copy.copy(self)
        other.node_id = next(_ids)
        other._claimed = False
        return other

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Replaces the arguments, for nodes that refer to each other in a cycle."""
        self._args, self._kwargs = args, kwargs

    def call(self) -> Any:
        """Calls the constructor (or function) with its handles turned into clients."""
        args, kwargs = replace_handles((self._args, self._kwargs), lambda handle: handle.dereference())
        return self._fn(*args, **kwargs)

    def disable_run(self) -> None:
        """Makes the node create and serve its object without calling `run()`, for tests that call it."""
        self._run = False

    def enable_run(self) -> None:
        """Reverts `disable_run`."""
        self._run = True

    def runs(self, obj: Any) -> bool:
        """Returns whether the object is a worker, which has work of its own; a service only answers calls."""
        return self._run and callable(getattr(obj, "run", None))

    def work(self, obj: Any) -> None:
        """Does the work of a worker: calls its function, or the object's `run()`.

        Raises:
          LaunchError: `run = step` returned after one step, although the program goes on.
        """
        if self.is_function:
            self.call()
            return
        obj.run()
        kind, finished = type(obj), getattr(obj, "finished", bool)
        if kind.run is getattr(kind, "step", None) and not (finished() or context.stop_was_asked()):
            raise LaunchError(
                f"{kind.__name__}: got run = step, which returned after one step, expected a loop over the "
                "steps that are left. Write run() as `while not launch.stop_event().is_set(): self.step()`, "
                "and call launch.stop(result) in the last step."
            )

    def close(self, obj: Any) -> None:
        """Closes the object of this node, if it can be closed."""
        closing = getattr(obj, "close", None)
        if callable(closing):
            closing()


class CourierNode(ProgramNode):
    """Serves the public methods of `constructor(*args, **kwargs)` and calls its `run()` if it has one.

    Args:
      constructor: creates the object in the node's process.
      courier_kwargs: `thread_pool_size` (number of calls carried out at once, default 128) and
        `max_frame_bytes` (largest array of a call or an answer, default 1 GiB).
      courier_client_kwargs: `call_timeout` (seconds or a `timedelta`; by default, and for None and 0, calls
        wait without a limit), `max_in_flight` (number of open futures of one client before the next call
        waits, default 1024) and `repeat_lost` (whether a call that was lost in a restart of the node is made
        again, for objects whose methods may be carried out twice; by default it raises `CallLost`).
    """

    serves = "courier"

    def __init__(
        self,
        constructor: Callable[..., Any],
        *args: Any,
        courier_kwargs: Mapping[str, Any] | None = None,
        courier_client_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(constructor, *args, **kwargs)
        self.server_options = _known(
            "courier_kwargs", courier_kwargs, {"thread_pool_size": 128, "max_frame_bytes": 1 << 30}
        )
        self.client_options = _known(
            "courier_client_kwargs",
            courier_client_kwargs,
            {"call_timeout": None, "max_in_flight": 1024, "repeat_lost": False},
        )
        self.client_options["call_timeout"] = timeout_seconds(self.client_options["call_timeout"])
        self.client_options["max_frame_bytes"] = self.server_options["max_frame_bytes"]


class PyClassNode(ProgramNode):
    """Creates an object and calls its `run()` if it has one; serves nothing."""


class PyNode(ProgramNode):
    """Calls `function(*args, **kwargs)`, once. `sys.exit(0)` in it is a return, as in a script."""

    is_function = True
    first_argument = "function"

    def call(self) -> Any:
        try:
            return super().call()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise


class ServerNode(ProgramNode):
    """The base class of nodes that are servers with a transport of their own, such as replay servers.

    Attributes:
      client_options: `(server, keys) -> client`, picklable. It gets the server in the server's process, and
        its address elsewhere.
    """

    serves = "server"

    def serve(self, *, embedded: bool, concurrent: bool, address: str | None, curve: Any) -> Any:
        """Returns the running server, which `close` stops.

        Args:
          embedded: whether all its clients are in this process.
          concurrent: whether they are in several threads.
          address: where it serves other processes.
          curve: its keys; None without any.
        """
        raise NotImplementedError

    def runs(self, obj: Any) -> bool:
        return False

    def close(self, obj: Any) -> None:
        obj.stop()


class _Colocation(ProgramNode):
    def __init__(self, nodes: Sequence[ProgramNode]) -> None:
        super().__init__(type(self))
        if not nodes or not all(isinstance(node, ProgramNode) for node in nodes):
            raise TypeError(f"{type(self).__name__}(nodes): got {nodes!r}, expected a list of nodes.")
        if any(node.parts() for node in nodes):
            raise ValueError(f"{type(self).__name__}(nodes): got nested colocations, expected other nodes.")
        self._nodes = list(nodes)

    def parts(self) -> Sequence[ProgramNode]:
        return self._nodes


class MultiThreadingColocation(_Colocation):
    """Several nodes as threads of one process. The nodes inside are not added to the program themselves.

    ```python
    store, view = lp.CourierNode(Store), lp.CourierNode(View)
    view.configure(store.create_handle())
    program.add_node(lp.MultiThreadingColocation([store, view]), label="store")
    ```
    """


class MultiProcessingColocation(_Colocation):
    """Several nodes that are one member of their group, each in its own process."""


class CacherNode(CourierNode):
    """Caches a node's answers for `refresh_interval` seconds.

    With it, many actors can ask one learner for its variables at the cost of one call. Calls with equal
    arguments share an answer. On the serial engine every call goes through, because nothing there depends on
    a clock.
    """

    def __init__(self, handle: Handle, refresh_interval: float) -> None:
        if not isinstance(handle, Handle):
            raise TypeError(f"CacherNode(handle): got {handle!r}, expected the handle of a node.")
        if refresh_interval < 0:
            raise ValueError(f"CacherNode(refresh_interval): got {refresh_interval}, expected seconds >= 0.")
        super().__init__(Cacher, handle, refresh_interval)


def _known(field: str, given: Mapping[str, Any] | None, defaults: dict[str, Any]) -> dict[str, Any]:
    check_known(field, given or {}, defaults)
    options = {**defaults, **(given or {})}
    for name in ("thread_pool_size", "max_in_flight"):
        if options.get(name, 1) < 1:  # Calls would wait without end.
            raise ValueError(f"{field}: {name}: got {options[name]}, expected at least 1.")
    return options
