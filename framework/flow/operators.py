"""`Flow`: a stream of items in the process that takes them, and operators that join several flows.

Every operator is a function that takes items from the flow before it when it is asked for one. An exception
in a step therefore appears in the stack of the consumer, with one frame for each operator. The flow does not
end with it: the next request is computed as usual.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import launch
from launch import context

Take = Callable[[], Any]
Ready = Callable[[], bool]

# Whether several flows take turns in this thread, so that none of them may wait for another.
_taking_turns = contextvars.ContextVar("_taking_turns", default=False)


class NotReady(launch.DeadlockError):
    """A flow needs a further item, for which the same thread has to do other work first.

    The items taken so far are kept. A plan on the serial engine, and `concurrent` without threads, ask again
    after other flows have had their turns.
    """


class Flow(Iterator[Any]):
    """A stream of items, computed when they are taken.

    Args:
      take: returns the next item; raises `StopIteration` at the end.
      ready: whether `take` can run without waiting for something that the same thread has to do.
    """

    def __init__(self, take: Take, ready: Ready = lambda: True) -> None:
        self._take = take
        self.ready = ready

    @classmethod
    def of(cls, items: Iterable[Any], ready: Ready = lambda: True) -> Flow:
        """Returns the flow of the items of an iterable, such as a `Dataset`."""
        return cls(iter(items).__next__, ready)

    def __next__(self) -> Any:
        return self._take()

    def _further(self) -> Any:
        """Takes another item for the same request, although the flow was known to be ready for one only."""
        if (_taking_turns.get() or _on_serial()) and not self.ready():
            raise NotReady(
                "Flow: got a flow that is not ready, expected further items of it for one request."
            )
        return self._take()

    def map(self, function: Callable[[Any], Any]) -> Flow:
        """Returns the flow of `function(item)`."""
        return Flow(lambda: function(self._take()), self.ready)

    def filter(self, keep: Callable[[Any], bool]) -> Flow:
        """Returns the flow of the items for which `keep(item)` is true."""

        def take() -> Any:
            item = self._take()
            while not keep(item):
                item = self._further()
            return item

        return Flow(take, self.ready)

    def flatten(self) -> Flow:
        """Returns the flow of the items of each item, which is an iterable."""
        rest: collections.deque[Any] = collections.deque()

        def take() -> Any:
            if not rest:
                rest.extend(self._take())
            while not rest:
                rest.extend(self._further())
            return rest.popleft()

        return Flow(take, lambda: bool(rest) or self.ready())

    def batch(self, size: int) -> Flow:
        """Returns the flow of lists of `size` consecutive items. A shorter rest at the end is dropped."""
        if size < 1:
            raise ValueError(f"batch(size): got {size}, expected at least 1.")
        items: list[Any] = []

        def take() -> list[Any]:
            items.append(self._take())
            while len(items) < size:
                items.append(self._further())  # The items before a failed step are kept.
            full = items.copy()
            items.clear()
            return full

        return Flow(take, self.ready)

    def combine(self, function: Callable[[Any], Iterable[Any]]) -> Flow:
        """Returns the flow of the items of `function(item)`: none or several for each item."""
        return self.map(function).flatten()

    def transform(self, function: Callable[[Iterator[Any]], Iterable[Any]]) -> Flow:
        """Returns the flow of `function(flow)`, which may be a generator function.

        An error ends a generator. The next request calls `function` again, with the items that follow.
        """
        made: Iterator[Any] | None = None  # `function` may take items at once.

        def take() -> Any:
            nonlocal made
            try:
                if made is None:
                    made = iter(function(self))
                return next(made)
            except StopIteration:
                raise
            except BaseException:
                made = None
                raise

        return Flow(take, self.ready)

    def tee(self, n: int = 2, ahead: int = 0, threads: bool | None = None) -> list[Flow]:
        """Returns `n` flows, each with every item. A branch waits for those that are behind.

        Args:
          n: number of branches.
          ahead: a branch takes no further item while another is more than this number of items behind.
          threads: whether different threads take the branches. If not, a branch that would have to wait
            raises `DeadlockError`. None means False on the serial engine and outside of a program.
        """
        if n < 1 or ahead < 0:
            raise ValueError(f"tee(n, ahead): got {n} and {ahead}, expected at least 1 and 0.")
        rests: list[collections.deque[Any]] = [collections.deque() for _ in range(n)]
        gate, waits = _Gate(), _use_threads(threads)
        taking = False

        def branch(i: int) -> Flow:
            rest, others = rests[i], [*rests[:i], *rests[i + 1 :]]

            def free() -> bool:
                return not taking and all(len(other) <= ahead for other in others)

            def take() -> Any:
                nonlocal taking
                with gate:
                    if not (waits or rest or free()):
                        raise launch.DeadlockError(
                            f"tee: branch {i} waits for another branch of the same thread, which is "
                            f"{ahead + 1} items behind. Take from that branch first, or increase `ahead`."
                        )
                    gate.wait_for(lambda: rest or free(), "tee")
                    if rest:
                        gate.notify_all()
                        return rest.popleft()
                    taking = True
                made = []
                try:
                    made.append(self._take())  # unlocked: the other branches may take their items
                finally:
                    with gate:
                        taking = False
                        for other in others:
                            other.extend(made)
                        gate.notify_all()
                return made[0]

            return Flow(take, lambda: bool(rest) or (free() and self.ready()))

        return [branch(i) for i in range(n)]


def alternate(*flows: Flow, weights: Sequence[int] | None = None) -> Flow:
    """Returns the items of several flows in turn, in one thread.

    Args:
      *flows: the flows. The others continue when one has ended.
      weights: number of consecutive items of each flow; None means one of each.
    """
    counts = [1] * len(flows) if weights is None else list(weights)
    if not flows or len(counts) != len(flows) or any(count < 1 for count in counts):
        raise ValueError(f"weights: got {weights!r}, expected an int >= 1 for each of {len(flows)} flows.")
    turns = collections.deque(flow for flow, count in zip(flows, counts, strict=True) for _ in range(count))
    return _take_turns(turns, skip=False)


def concurrent(*flows: Flow, ahead: int = 0, threads: bool | None = None) -> Flow:
    """Returns the items of several flows as they become ready. Each flow runs in a thread of its own.

    Args:
      *flows: the flows. The result ends when all of them have ended.
      ahead: a flow computes no further item while more than this number of its items has not been taken.
      threads: whether to use threads. Without threads, the flows that are ready take turns and nothing runs
        ahead. None means False on the serial engine and outside of a program.
    """
    if not flows or ahead < 0:
        raise ValueError(f"concurrent: got {len(flows)} flows and ahead={ahead}, expected at least 1 and 0.")
    if not _use_threads(threads):
        return _take_turns(collections.deque(flows), skip=True)
    gate = _Gate()
    items: collections.deque[tuple[int, Any, BaseException | None]] = collections.deque()
    untaken, running = [0] * len(flows), set(range(len(flows)))
    place = context.find_runtime(), context.find_context()

    def run(i: int) -> None:
        context.enter(*place)
        with contextlib.suppress(launch.ProgramStopped):
            while i in running:
                with gate:
                    gate.wait_for(lambda: untaken[i] <= ahead, "concurrent")
                item, error = None, None
                try:
                    item = next(flows[i])
                except StopIteration:
                    running.discard(i)
                except BaseException as raised:  # Also SystemExit. The consumer gets it in place of the item.
                    error = raised
                with gate:
                    if i in running:
                        items.append((i, item, error))
                        untaken[i] += 1
                    gate.notify_all()

    threads_to_start = [
        threading.Thread(target=run, args=(i,), name=f"flow-{i}", daemon=True) for i in range(len(flows))
    ]

    def take() -> Any:
        while threads_to_start:  # With the first item.
            threads_to_start.pop().start()
        with gate:
            gate.wait_for(lambda: items or not running, "concurrent")
            if not items:
                raise StopIteration
            i, item, error = items.popleft()
            untaken[i] -= 1
            gate.notify_all()
        if error is not None:
            raise error
        return item

    flow = Flow(take)
    weakref.finalize(flow, gate.close)
    return flow


def _take_turns(turns: collections.deque[Flow], skip: bool) -> Flow:
    """Returns the items of flows in turn; with `skip`, of those that are ready."""

    def take() -> Any:
        has_ended = False
        while turns:
            for _ in range(len(turns)):
                if not skip or turns[0].ready():
                    break
                turns.rotate(-1)
            else:
                raise NotReady(f"concurrent: none of {len(turns)} flows is ready.")
            flow = turns[0]
            try:
                with _turn(skip):
                    item = flow._further() if has_ended else next(flow)
            except StopIteration:
                while flow in turns:
                    turns.remove(flow)
                has_ended = True  # The others are asked for the same request.
                continue
            except NotReady:
                if not skip:
                    raise
                turns.rotate(-1)
                continue
            except Exception:
                turns.rotate(-1)  # The error was this flow's turn.
                raise
            turns.rotate(-1)
            return item
        raise StopIteration

    return Flow(take, lambda: not turns or any(flow.ready() for flow in (turns if skip else [turns[0]])))


class _Gate:
    """A condition whose waits end with `ProgramStopped` when the program stops, or after `close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        close = weakref.WeakMethod(self.close)
        launch.register_stop_handler(lambda: (method := close()) and method())

    def __enter__(self) -> None:
        self._changed.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._changed.__exit__(*error)

    def close(self) -> None:
        with self:
            self._closed = True
            self.notify_all()

    def notify_all(self) -> None:
        self._changed.notify_all()

    def wait_for(self, predicate: Callable[[], Any], what: str) -> None:
        self._changed.wait_for(lambda: predicate() or self._closed)
        if not predicate():
            raise launch.ProgramStopped(f"{what}: the program stops.")


@contextlib.contextmanager
def _turn(taken: bool) -> Iterator[None]:
    """With `taken`, other flows of this thread have turns too. `Snapshot` can pickle this function."""
    token = _taking_turns.set(taken or _taking_turns.get())
    try:
        yield
    finally:
        _taking_turns.reset(token)


def _use_threads(threads: bool | None) -> bool:
    return threads if threads is not None else context.find_context() is not None and not _on_serial()


def _on_serial() -> bool:
    node = context.find_context()
    return node is not None and node.engine == "serial"
