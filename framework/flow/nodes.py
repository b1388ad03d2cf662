"""The nodes of a plan: objects in other processes, or in this one, on which a plan runs functions."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import launch

# A step of a plan that runs where a node is: a function of the node's object, and of the item before it.
Step = Callable[..., Any]
Key = tuple[bytes, int]

# A plan may make new functions in each iteration, so both sides forget the oldest ones.
_FUNCTIONS = 32  # kept for one caller, in the order in which they were first sent
_CALLERS = 1024  # kept for one object, in the order of their last calls


class StepError(RuntimeError):
    """A step failed in a node. The step's own exception is the `__cause__`, with the remote traceback.

    Attributes:
      node: the name of the node.
      round_ended: whether the calls of the other nodes have ended too, as in `sync`.
    """

    def __init__(self, text: str, node: str = "", round_ended: bool = False) -> None:
        super().__init__(text)
        self.node, self.round_ended = node, round_ended


class UnknownFunction(LookupError):
    """A node no longer has the function: it was restarted, or too many `Node`s have called it since."""


def run(function: Step, obj: Any, args: tuple) -> Any:
    """Returns `function(obj, *args)`.

    A step that calls a restarted node may raise the same errors by which a plan recognizes that its own call
    was lost and has to be repeated. They become a RuntimeError, so that they count as errors of the step.
    """
    try:
        return function(obj, *args)
    except (launch.CallLost, UnknownFunction) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _limit_torch() -> None:
    """Gives torch, if it is loaded, one thread or `OMP_NUM_THREADS`, as the other nodes of programs do.

    With all cores, small networks are several times slower, on engines within one process, too.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))


class Host:
    """Holds the object of a `worker_node` and runs functions on it."""

    def __init__(self, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        _limit_torch()
        self._object = constructor(*args, **kwargs)
        _limit_torch()
        self._functions: dict[bytes, dict[int, Step]] = {}

    def call(self, key: Key, function: Step | None, args: tuple) -> Any:
        """Returns `function(object, *args)`.

        Args:
          key: the caller, and its number of the function. A caller counts the functions that it sends.
          function: sent once for each key. None refers to the function sent before with this key, which must
            be one of the caller's last 32.
          args: further arguments.

        Raises:
          UnknownFunction: The function was sent to an object that this one has replaced, or was forgotten.
        """
        caller, number = key
        known = self._functions[caller] = self._functions.pop(caller, {})  # The last caller is the last key.
        if len(self._functions) > _CALLERS:
            del self._functions[next(iter(self._functions))]
        if function is not None:
            known[number] = function
            known.pop(number - _FUNCTIONS, None)  # As in `Node.call`.
        elif number not in known:
            raise UnknownFunction(
                f"call: got function {number} without its code, expected one that this object was sent and "
                "keeps. Call `forget()` of the `Node` and repeat the call."
            )
        return run(known[number], self._object, args)

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
    """

    def __init__(self, client: Any, name: str = "node") -> None:
        self.name = name
        self._client = client
        self._caller = os.urandom(8)  # Several `Node`s may call one object.
        self._numbers: dict[Step, int] = {}
        self._sent = 0  # Functions; the number of the next one.
        self._sending = threading.Lock()

    def call(self, function: Step, *args: Any) -> Future:
        """Runs `function(object, *args)` in the node and returns the future of its result.

        A function is sent once, and again after 32 others. Functions of modules and classes are sent by name,
        others by value.
        """
        with self._sending:  # The function must travel with the first of its calls.
            number = self._numbers.get(function)
            if number is not None:
                return self._client.futures.call((self._caller, number), None, args)
            call = self._client.futures.call((self._caller, self._sent), function, args)
            self._numbers[function] = self._sent  # only now, because the call may have failed
            if self._sent - next(iter(self._numbers.values())) >= _FUNCTIONS:
                del self._numbers[next(iter(self._numbers))]
            self._sent += 1
            return call

    def forget(self) -> None:
        """Sends every function again: the node holds a new object."""
        with self._sending:
            self._numbers.clear()


class LocalNode(Node):
    """An object in this process; a call runs at once, in the caller's thread."""

    def __init__(self, obj: Any, name: str = "local") -> None:
        super().__init__(None, name)
        self._object = obj

    def call(self, function: Step, *args: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(run(function, self._object, args))
        except Exception as error:
            future.set_exception(error)
        return future
