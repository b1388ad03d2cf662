"""The nodes of a plan: objects in other processes, or in this one, on which a plan runs functions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import launch
from launch import platforms
from launch.errors import message_of

# A step of a plan that runs where a node is: a function of the node's object, and of the item before it.
Step = Callable[..., Any]


class StepError(RuntimeError):
    """A step failed in a node. The step's own exception is the `__cause__`, with the remote traceback.

    Attributes:
      node: the name of the node.
      round_ended: whether the calls of the other nodes have ended too, as in `sync`.
    """

    def __init__(self, text: str, node: str = "", round_ended: bool = False) -> None:
        super().__init__(text)
        self.node, self.round_ended = node, round_ended


def run(function: Step, obj: Any, args: tuple) -> Any:
    """Returns `function(obj, *args)`.

    A step that calls a restarted node may raise the same error by which a plan recognizes that its own call
    was lost and has to be repeated. It becomes a RuntimeError, so that it counts as an error of the step.
    So does `sys.exit()`.
    """
    try:
        return function(obj, *args)
    except (launch.CallLost, SystemExit) as error:
        raise RuntimeError(f"{type(error).__name__}: {message_of(error)}") from error


class Host:
    """Holds the object of a `worker_node` and runs functions on it."""

    def __init__(self, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        platforms.limit_torch()  # Also on engines within one process.
        self._object = constructor(*args, **kwargs)
        platforms.limit_torch()

    def call(self, function: Step, args: tuple) -> Any:
        """Returns `function(object, *args)`."""
        return run(function, self._object, args)

    def close(self) -> None:
        """Closes the object, if it can be closed."""
        close = getattr(self._object, "close", None)
        if callable(close):
            close()


def worker_node(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> launch.CourierNode:
    """Returns a `launch` node that holds `constructor(*args, **kwargs)` for a plan; see `Node`."""
    return launch.CourierNode(Host, constructor, *args, courier_kwargs={"thread_pool_size": 1}, **kwargs)


class Node:
    """A node of a program, as the plan's process sees it. Calls are carried out first in, first out.

    Args:
      client: the client of a `worker_node`.
      name: the name of the node in errors.

    Attributes:
      name: the name of the node in errors.
      was_called: whether there was a call.
    """

    def __init__(self, client: Any, name: str = "node") -> None:
        self.name, self.was_called = name, False
        self._client = client

    def call(self, function: Step, *args: Any) -> Future:
        """Runs `function(object, *args)` in the node and returns the future of its result.

        Functions of modules and classes are sent by name, others by value.
        """
        self.was_called = True
        return self._client.futures.call(function, args)


class LocalNode(Node):
    """An object in this process; a call runs at once, in the caller's thread."""

    def __init__(self, obj: Any, name: str = "local") -> None:
        super().__init__(None, name)
        self._object = obj

    def call(self, function: Step, *args: Any) -> Future:
        self.was_called = True
        future: Future = Future()
        try:
            future.set_result(run(function, self._object, args))
        except Exception as error:
            future.set_exception(error)
        return future
