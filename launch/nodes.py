"""Nodes: what runs where. A node holds how its object is made; its own process makes it."""

from __future__ import annotations

import copy
import importlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from launch import context
from launch.handles import Handle, dereference_nest, replace_handles, timeout_seconds

_ids = itertools.count(1)


class Node:
    """What all nodes share.

    Attributes:
      node_id: unique in the process that builds programs.
      serves: `"courier"` if methods are served, `"replay"` for a replay server, None if nothing is.
    """

    serves: ClassVar[str | None] = None

    def __init__(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        if not callable(fn):
            raise TypeError(f"{type(self).__name__}(constructor): expected something to call, got {fn!r}")
        self.node_id = next(_ids)
        self._fn = fn
        self._args = args
        self._kwargs = kwargs
        self._claimed = False
        self._run = True

    @property
    def description(self) -> str:
        return f"{type(self).__name__}({getattr(self._fn, '__name__', type(self._fn).__name__)})"

    def create_handle(self) -> Handle:
        """The handle of this node; `add_node` returns the same."""
        return Handle(self.node_id, self.description)

    def parts(self) -> Sequence[Node]:
        """The nodes inside of this one: those of a colocation, else none."""
        return ()

    def handles(self) -> list[Handle]:
        """The handles in the arguments: the nodes that this one can call."""
        found: list[Handle] = []

        def note(handle: Handle) -> Handle:
            found.append(handle)
            return handle

        replace_handles((self._args, self._kwargs), note)
        return found

    def claim(self) -> None:
        """Marks the node as one of a program."""
        if self._claimed:
            raise ValueError(f"{self.description} has been added to a program already; make a new node")
        self._claimed = True

    def copy(self) -> Node:
        """A node with the same constructor and arguments that is in no program."""
        other = copy.copy(self)
        other.node_id = next(_ids)
        other._claimed = False
        return other

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Replaces the arguments, for nodes that refer to each other in a circle."""
        self._args, self._kwargs = args, kwargs

    def call(self) -> Any:
        """Calls the constructor (or function) with its handles turned into clients."""
        return self._fn(*dereference_nest(self._args), **dereference_nest(self._kwargs))

    @property
    def is_function(self) -> bool:
        """Whether `call` is the work itself and no constructor."""
        return False

    def disable_run(self) -> None:
        """Only makes (and serves) the object, as tests want it that call it themselves."""
        self._run = False

    def enable_run(self) -> None:
        """Takes back `disable_run`."""
        self._run = True

    def runs(self, obj: Any) -> bool:
        """Whether the object has work of its own (a worker), or only serves."""
        return self._run and callable(getattr(obj, "run", None))

    def close(self, obj: Any) -> None:
        """Closes the object of this node, if it can be closed."""
        closing = getattr(obj, "close", None)
        if callable(closing):
            closing()


class CourierNode(Node):
    """Serves the public methods of `constructor(*args, **kwargs)`; its `run()` is called if it has one.

    Args:
      constructor: makes the object, in the node's process.
      courier_kwargs: `thread_pool_size` (calls carried out at once, default 128) and `max_frame_bytes`.
      courier_client_kwargs: `call_timeout` (seconds or a `timedelta`; None and 0 wait without a limit, the
        default), `max_in_flight` (futures of one client that may be open; the next call waits; default 1024)
        and `repeat_lost` (default False: a call that the node had when it was restarted raises `CallLost`;
        True: it is made again, for objects whose methods may be carried out twice).
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
        super().__init__(constructor, args, kwargs)
        self.server_options = _known(
            "courier_kwargs", courier_kwargs, {"thread_pool_size": 128, "max_frame_bytes": 1 << 30}
        )
        self.client_options = _known(
            "courier_client_kwargs",
            courier_client_kwargs,
            {"call_timeout": None, "max_in_flight": 1024, "repeat_lost": False},
        )
        self.client_options["call_timeout"] = timeout_seconds(self.client_options["call_timeout"])


class PyClassNode(Node):
    """Makes an object and calls its `run()` if it has one; serves nothing."""

    def __init__(self, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(constructor, args, kwargs)


class PyNode(Node):
    """Calls `fn(*args, **kwargs)`, once."""

    def __init__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(fn, args, kwargs)

    @property
    def is_function(self) -> bool:
        return True


class ReplayNode(Node):
    """A replay server; its handle becomes a replay client.

    Args:
      tables_fn: makes the tables, in the node's process.
      checkpointer_fn: makes the checkpointer, or None.
      backend: name of a module with the functions `serve_node` and `connect_node`, such as
        `framework.replay.dm_reverb`.
    """

    serves = "replay"

    def __init__(
        self,
        tables_fn: Callable[[], Any],
        *,
        checkpointer_fn: Callable[[], Any] | None = None,
        backend: str = "framework.replay",
    ) -> None:
        super().__init__(tables_fn, (), {})
        self.checkpointer_fn = checkpointer_fn
        self.backend = backend

    def serve(self, *, embedded: bool, concurrent: bool, address: str | None, curve: Any) -> Any:
        """The server with the tables of `tables_fn`."""
        checkpointer = self.checkpointer_fn() if self.checkpointer_fn is not None else None
        return importlib.import_module(self.backend).serve_node(
            self.call(),
            embedded=embedded,
            concurrent=concurrent,
            address=address,
            curve=curve,
            checkpointer=checkpointer,
        )

    def runs(self, obj: Any) -> bool:
        return False

    def close(self, obj: Any) -> None:
        obj.stop()


class ReverbNode(ReplayNode):
    """A `ReplayNode` with the arguments of Launchpad's.

    Args:
      priority_tables_fn: makes the tables, in the node's process.
      checkpoint_ctor: makes the checkpointer, or None.
      checkpoint_time_delta_minutes: minutes between two checkpoints; None makes none by itself. The serial
        engine makes none, because nothing there depends on a clock.
    """

    def __init__(
        self,
        priority_tables_fn: Callable[[], Any],
        checkpoint_ctor: Callable[[], Any] | None = None,
        checkpoint_time_delta_minutes: float | None = None,
    ) -> None:
        if checkpoint_time_delta_minutes is not None and checkpoint_time_delta_minutes <= 0:
            raise ValueError(
                f"checkpoint_time_delta_minutes: got {checkpoint_time_delta_minutes}, expected minutes > 0"
            )
        super().__init__(priority_tables_fn, checkpointer_fn=checkpoint_ctor)
        self._delta_minutes = checkpoint_time_delta_minutes

    def serve(self, *, embedded: bool, concurrent: bool, address: str | None, curve: Any) -> Any:
        server = super().serve(embedded=embedded, concurrent=concurrent, address=address, curve=curve)
        if self._delta_minutes is not None and concurrent:
            stopped, seconds = context.stop_event(), 60 * self._delta_minutes

            def checkpoint() -> None:
                client = connect_replay(self.backend, server if embedded else address, curve)
                while not stopped.wait(seconds):
                    client.checkpoint()

            threading.Thread(target=checkpoint, name="replay-checkpoints", daemon=True).start()
        return server


def connect_replay(backend: str, server_or_address: Any, curve: Any) -> Any:
    """A replay client of a server in this process, or of one at an address."""
    return importlib.import_module(backend).connect_node(server_or_address, curve)


class _Colocation(Node):
    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(type(self), (), {})
        if not nodes or not all(isinstance(node, Node) for node in nodes):
            raise TypeError(f"{type(self).__name__}(nodes): expected a list of nodes, got {nodes!r}")
        if any(node.parts() for node in nodes):
            raise ValueError(f"{type(self).__name__}(nodes): colocations cannot be nested")
        self._nodes = list(nodes)

    def parts(self) -> Sequence[Node]:
        return self._nodes


class MultiThreadingColocation(_Colocation):
    """Several nodes as threads of one process. The nodes inside are not added to the program themselves::

    store, view = lp.CourierNode(Store), lp.CourierNode(View)
    view.configure(store.create_handle())
    program.add_node(lp.MultiThreadingColocation([store, view]), label="store")
    """


class MultiProcessingColocation(_Colocation):
    """Several nodes that are one member of their group, each in a process of its own."""


class CacherNode(CourierNode):
    """Answers calls for a node from what it answered at most `refresh_interval` seconds ago.

    Many actors may then ask one learner for its variables at the price of one call. Calls with equal
    arguments share an answer. On the serial engine every call goes through, because nothing there depends
    on a clock.
    """

    def __init__(self, handle: Handle, refresh_interval: float) -> None:
        from launch.caching import Cacher

        if not isinstance(handle, Handle):
            raise TypeError(f"CacherNode(handle): expected the handle of a node, got {handle!r}")
        if refresh_interval < 0:
            raise ValueError(f"CacherNode(refresh_interval): expected seconds >= 0, got {refresh_interval}")
        super().__init__(Cacher, handle, refresh_interval)


def _known(field: str, given: Mapping[str, Any] | None, defaults: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(given or {}) - set(defaults))
    if unknown:
        raise ValueError(f"{field}: unknown {unknown}; known are {sorted(defaults)}")
    return {**defaults, **(given or {})}
