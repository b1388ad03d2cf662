"""Handles represent nodes in the arguments of other nodes, where they become clients."""

from __future__ import annotations

import copy
import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

from launch import context


class Handle:
    """Represents a node. Becomes a client in the process that uses it.

    ```python
    learner = program.add_node(lp.CourierNode(Learner))
    program.add_node(lp.CourierNode(Actor, learner))        # Actor.__init__ gets a client
    ```
    """

    def __init__(self, node_id: int, description: str) -> None:
        self.node_id = node_id
        self._description = description

    def members(self) -> Sequence[Handle]:
        """Returns the handles of the single nodes that this one represents."""
        return (self,)

    def dereference(self) -> Any:
        """Returns the client of the node, for use inside of the running program."""
        runtime = context.find_runtime()
        if runtime is None:
            raise RuntimeError(
                f"{self!r} was dereferenced outside of a running program. Pass the handle to a node, which "
                "gets a client in its place, or call launch.start(program).client(label)."
            )
        return runtime.client(self.node_id)

    def __reduce__(self) -> Any:
        return Handle, (self.node_id, self._description)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other.node_id == self.node_id

    def __hash__(self) -> int:
        return hash(self.node_id)

    def __repr__(self) -> str:
        return f"Handle({self._description})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self!r} has no attribute {name!r}: a handle is not the node. Pass it to a node, which gets a "
            f"client in its place, or call handle.dereference().{name} inside of a node."
        )


class HandleGroup(Handle):
    """Represents several nodes. Becomes `connect(handles)` in the process that uses it.

    Args:
      handles: the nodes' handles.
      connect: a function of a module, or a partial of one, that makes a client of the handles, with
        `Handle.dereference`.
    """

    def __init__(self, handles: Sequence[Handle], connect: Callable[[Sequence[Handle]], Any]) -> None:
        super().__init__(handles[0].node_id, ", ".join(map(repr, handles)))
        self._handles, self._connect = handles, connect

    def members(self) -> Sequence[Handle]:
        return self._handles

    def dereference(self) -> Any:
        """Returns the client of the nodes."""
        return self._connect(self._handles)

    def __reduce__(self) -> Any:
        return HandleGroup, (self._handles, self._connect)


def replace_handles(value: Any, replace: Callable[[Handle], Any], _inside: tuple[int, ...] = ()) -> Any:
    """Returns `value` with `replace(handle)` in place of each handle.

    Handles may be inside of lists, tuples, dicts, sets, partials, dataclasses and `attrs` classes. A
    container is copied if something in it changes.
    """
    if isinstance(value, Handle):
        return replace(value)
    if isinstance(value, functools.partial):
        args = replace_handles(value.args, replace, _inside)
        keywords = replace_handles(value.keywords, replace, _inside)
        unchanged = args is value.args and keywords is value.keywords
        return value if unchanged else functools.partial(value.func, *args, **keywords)
    if isinstance(value, dict):
        new = {key: replace_handles(item, replace, _inside) for key, item in value.items()}
        if all(new[key] is value[key] for key in value):
            return value
        copied = value.copy()
        copied.update(new)
        return copied
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [replace_handles(item, replace, _inside) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return _replace_in_fields(value, replace, _inside)


def _replace_in_fields(value: Any, replace: Callable[[Handle], Any], inside: tuple[int, ...]) -> Any:
    if id(value) in inside or isinstance(value, type):  # objects may refer to each other in a cycle
        return value
    attrs = {field.name: field for field in getattr(value, "__attrs_attrs__", ())}
    changed = {}
    for name in getattr(value, "__dataclass_fields__", attrs):
        old = getattr(value, name, None)  # a field may have no value
        new = replace_handles(old, replace, (*inside, id(value)))
        if new is not old:
            changed[name] = new
    if not changed:
        return value
    copied = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(copied, name, new)  # it may be frozen
    return copied


def timeout_seconds(timeout: float | datetime.timedelta | None) -> float | None:
    """Returns a timeout in seconds; None means no timeout, and so does 0, as in courier."""
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if seconds is not None and seconds < 0:
        raise ValueError(f"call_timeout: got {timeout}, expected seconds >= 0.")
    return seconds or None


def client_of(node_id: int) -> Any:
    """Unpickles a client: the receiving process creates its own."""
    return context.current_runtime().client(node_id)


# Calls a method by its name, with positional and keyword arguments and a timeout in seconds, or None.
Calls = Callable[[str, tuple, dict[str, Any], float | None], Any]


class Methods:
    """Turns each attribute into a method that calls `call(name, args, kwargs, timeout)`."""

    def __init__(self, call: Calls, timeout: float | None) -> None:
        self._call = call
        self._timeout = timeout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", args, kwargs, self._timeout)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"{name!r}: only public methods can be called in another node")

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs, self._timeout)

        self.__dict__[name] = method
        return method


class NodeClient(Methods):
    """Calls the public methods of a node's object; the same on every engine.

    ```python
    client.add(1, 2)                        # waits for the answer
    future = client.futures.add(1, 2)       # a concurrent.futures.Future
    client.with_timeout(2.0).add(1, 2)      # CallTimeout after two seconds
    client(1, 2)                            # the object's __call__
    ```

    If a method raises, the call raises the same exception; its `__cause__` shows the remote traceback.
    """

    def __init__(self, node_id: int, call: Calls, submit: Calls, timeout: float | None = None) -> None:
        super().__init__(call, timeout)
        self._node_id = node_id
        self._submit = submit
        self.futures = Methods(submit, timeout)

    def with_timeout(self, timeout: float | datetime.timedelta | None) -> NodeClient:
        """Returns the same client with a timeout for calls (`CallTimeout`); None and 0 mean no limit."""
        return NodeClient(self._node_id, self._call, self._submit, timeout_seconds(timeout))

    def __reduce__(self) -> Any:
        return client_of, (self._node_id,)

    def __repr__(self) -> str:
        return f"NodeClient(node {self._node_id})"


class Target:
    """Finds an object's method for a call: public methods and `__call__` only.

    Attributes:
      method: returns the bound method of a name; raises `AttributeError` with the existing names if there is
        none. It keeps the methods it has found.
    """

    def __init__(self, obj: Any, name: str) -> None:
        self.object = obj
        self.name = name
        self.method: Callable[[str], Callable[..., Any]] = functools.cache(self._find)

    def _find(self, name: str) -> Callable[..., Any]:
        public = isinstance(name, str) and (name == "__call__" or not name.startswith("_"))
        found = getattr(self.object, name, None) if public else None
        if not callable(found):
            names = [n for n in dir(self.object) if not n.startswith("_")]
            raise AttributeError(
                f"node {self.name!r} ({type(self.object).__name__}) has no method {name!r}; it has "
                f"{sorted(n for n in names if callable(getattr(self.object, n, None)))}."
            )
        return found
