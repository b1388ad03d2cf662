"""Batches concurrent calls of many clients into one call, as inference servers do."""

from __future__ import annotations

import datetime
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from launch import context
from launch.futures import CallThreads, settle


def batched_handler(
    batch_size: int,
    max_parallelism: int = 1,
    timeout: float | datetime.timedelta = 0.2,
    pad_batch: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """Marks a method that handles `batch_size` calls at once.

    ```python
    class Inference:
        @lp.batched_handler(batch_size=8, timeout=0.01)
        def act(self, observation):             # [8, ...]; each caller passed one [...]
            return self.policy(observation)     # [8, ...]; each caller gets its own row
    ```

    A bound method may be replaced too: `self.act = lp.batched_handler(batch_size=n)(self.act)`.

    The arguments of the calls are stacked along a new leading axis, and the result is split along it. They
    are nests of arrays and numbers, all of the same structure; a list of numbers counts as an array. If the
    method raises, every caller of the batch gets the exception. On the serial engine a batch is one call.

    Args:
      batch_size: number of calls in a full batch.
      max_parallelism: number of batches that may be handled at the same time.
      timeout: seconds that the first call of a batch waits for others; then the batch is handled as it is.
      pad_batch: whether to fill a partial batch by repeating its last row, so that all batches have the same
        shape.
    """
    for name, value in (("batch_size", batch_size), ("max_parallelism", max_parallelism)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"batched_handler({name}): got {value!r}, expected an int >= 1.")
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if seconds < 0:
        raise ValueError(f"batched_handler(timeout): got {timeout}, expected seconds >= 0.")
    options = BatchOptions(batch_size, seconds, pad_batch, max_parallelism)

    def mark(function: Callable[..., Any]) -> Any:
        if getattr(function, "__self__", None) is not None:
            return BatchedMethod(function, function.__name__, options)
        return _BatchedHandler(function, options)

    return mark


class BatchOptions(NamedTuple):
    """The options of `batched_handler`; the timeout is in seconds."""

    batch_size: int
    timeout: float
    pad: bool = False
    max_parallelism: int = 1


class _BatchedHandler:
    """The descriptor in the class; each object gets its own `BatchedMethod`."""

    def __init__(self, function: Callable[..., Any], options: BatchOptions) -> None:
        functools.update_wrapper(self, function)  # type: ignore[arg-type]
        self._function, self._name, self._options = function, function.__name__, options

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        method = BatchedMethod(functools.partial(self._function, obj), self._name, self._options)
        # `super()` finds the descriptor of a base class, whose method must not be the class's.
        is_own = getattr(type(obj), self._name, None) is self
        # If two threads get here at once, both receive the method that was stored first.
        return obj.__dict__.setdefault(self._name if is_own else f"{self._name}@{id(self)}", method)


class _BatchedCall(NamedTuple):
    """A call that waits for its batch."""

    args: tuple
    kwargs: dict[str, Any]
    future: Future


class BatchedMethod:
    """A bound batched method. A call waits for the answer; `submit` returns a future."""

    def __init__(self, function: Callable[..., Any], name: str, options: BatchOptions) -> None:
        self.__name__ = name
        self._function = function
        self._options = options
        self._condition = threading.Condition()
        self._batch: list[_BatchedCall] | None = None  # the one that takes further calls
        self._threads = CallThreads(options.max_parallelism)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.submit(args, kwargs).result()

    def submit(self, args: tuple, kwargs: dict[str, Any]) -> Future:
        """Adds a call to the next batch and returns the future of its answer."""
        here, call = context.here, _BatchedCall(args, kwargs, Future())
        if here.context is not None and here.context.engine == "serial":
            self._handle([call])
            return call.future
        with self._condition:
            if self._batch is None:
                batch: list[_BatchedCall] = []
                until, place = time.monotonic() + self._options.timeout, (here.runtime, here.context)
                self._threads.submit(functools.partial(self._gather, batch, until, *place))
                self._batch = batch  # Only now: there may be no thread for it.
            self._batch.append(call)
            if len(self._batch) == self._options.batch_size:
                self._batch = None
                self._condition.notify_all()
        return call.future

    def _gather(self, batch: list[_BatchedCall], until: float, runtime: Any, node: Any) -> None:
        """Waits until a batch is full, at most until the time `until`, and handles it."""
        with self._condition:
            while self._batch is batch and (left := until - time.monotonic()) > 0:
                self._condition.wait(left)
            if self._batch is batch:
                self._batch = None
        with context.entered(runtime, node):
            self._handle(batch)

    def _handle(self, batch: list[_BatchedCall]) -> None:
        batch = [call for call in batch if not call.future.done()]  # canceled or timed out
        if not batch:
            return
        try:
            calls = [
                (tuple(map(_vector, call.args)), {name: _vector(arg) for name, arg in call.kwargs.items()})
                for call in batch
            ]
            if self._options.pad:
                calls += [calls[-1]] * (self._options.batch_size - len(calls))
            args, kwargs = _stack(calls)
            rows = _unstack(self._function(*args, **kwargs), len(calls), self.__name__)
        except BaseException as error:
            for call in batch:
                settle(call.future, error=error)
            return
        for call, row in zip(batch, rows, strict=False):
            settle(call.future, row)


def _vector(argument: Any) -> Any:
    """Converts a list of numbers to an array, because it is not a nest."""
    if type(argument) is list and all(isinstance(item, (int, float)) for item in argument):
        import numpy as np

        return np.asarray(argument)
    return argument


def _stack(calls: list[Any]) -> Any:
    import numpy as np
    import tree

    for call in calls[1:]:
        tree.assert_same_structure(calls[0], call)
    return tree.map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *calls)


def _unstack(answer: Any, rows: int, name: str) -> list[Any]:
    import tree

    flat = tree.flatten(answer)
    for leaf in flat:
        shape = getattr(leaf, "shape", None)
        length = shape[0] if shape else len(leaf) if hasattr(leaf, "__len__") else None
        if length != rows:
            raise ValueError(
                f"batched method {name!r}: got a leaf with leading size {length} for a batch of {rows}, "
                "expected one row for each call."
            )
    return [tree.unflatten_as(answer, [leaf[row] for leaf in flat]) for row in range(rows)]
