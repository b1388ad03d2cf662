"""Callbacks: code of an application that runs at events of a run, in the process that launches it.

```text
engines of one process     monitor ─▶ CallbackHost ─▶ callbacks
others                     monitor ─▶ Mailbox ◀─ exchange_events ── CallbackHost ─▶ callbacks
```
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import launch
from framework.clock import Clock
from launch.engines.base import Job
from launch.errors import without_exit

_POLL_S = 5.0  # Seconds that a request for the next event stays open.
_LONGEST_S = 3_600.0  # Seconds that a callback may take.
_END_S = 10.0  # Seconds to wait for the last call at the end of a run.


class Callback:
    """Called at events of a run, one call at a time. Override the methods that you need.

    ```python
    class Enough(Callback):
        def on_evaluation(self, label, row):
            if row["episode_return_min"] >= 400:
                launch.stop({"reason": "enough", **row})             # what launch.launch() returns

    program = make_program(agent, environment, config, callbacks=[Enough()])
    ```

    On every engine, the calls run in the process that launches the program, on the object that was given: its
    attributes change, and it may hold what cannot be pickled, such as an Optuna trial. A call may be made on
    another thread than the launching one. The node that caused the event waits for it. `launch.stop(result)`
    stops the run, and so does an exception, which `launch.launch` raises.

    Attributes:
      step_period: steps of the program's clock (env steps) between two calls of `on_step`, at least.
    """

    step_period: int = 1_000
    _host: CallbackHost | None = None

    def on_start(self) -> None:
        """Called before any other event, after `restore`."""

    def on_step(self, steps: int, snapshot: dict[str, Any]) -> None:
        """Called after a row of metrics, at most once in `step_period` steps.

        Args:
          steps: steps of the program's clock so far.
          snapshot: the newest rows of all labels and the counts, see `Monitor.snapshot`.
        """

    def on_row(self, label: str, row: dict[str, Any], snapshot: dict[str, Any]) -> None:
        """Called after each row of metrics, evaluations' too.

        Args:
          label: what wrote the row, such as `"learner"` or `"actor-0"`.
          row: names to scalars.
          snapshot: the newest rows of all labels, see `Monitor.snapshot`.
        """

    def on_evaluation(self, label: str, row: dict[str, Any]) -> None:
        """Called after each evaluation.

        Args:
          label: name of the evaluator, `"evaluator"` unless the agent's graph says otherwise.
          row: `episode_return` (the mean), `episode_return_min`, `env_steps`, `learner_steps`, …
        """

    def on_checkpoint(self, path: str) -> None:
        """Called after each checkpoint of the run, also the last; `path` is its folder."""

    def on_end(self, result: Any) -> None:
        """Called when all nodes have ended; `result` is what `launch.launch` returns, None after an error."""

    def policy(self) -> Any:
        """A `GreedyPolicy` with the newest parameters of the learner, which later steps do not change.

        Raises:
          LaunchError: The program has no learner, or its nodes have ended.
        """
        if self._host is None:
            raise launch.LaunchError("policy: got no running program. Call it in a method of a callback.")
        return self._host.policy()

    def save(self) -> Any:
        """The state that a resumed run gives to `restore`: dicts, lists, tensors, arrays and scalars.

        It is called after each event, and saved with the next checkpoint. None saves nothing.
        """
        return None

    def restore(self, state: Any) -> None:
        """Takes what `save` returned at the checkpoint from which the run goes on."""


class OnWrite(Callback):
    """The callback that calls `function(snapshot)` after each row: `make_program(..., on_write=function)`."""

    def __init__(self, function: Callable[[dict[str, Any]], None]):
        self.function = function

    def on_row(self, label: str, row: dict[str, Any], snapshot: dict[str, Any]) -> None:
        self.function(snapshot)


class CallbackHost:
    """The callbacks of a program, in the process that launches it. In another one it becomes a `Mailbox`.

    Args:
      callbacks: the callbacks.
      make_policy: makes the policy with the newest parameters of a job.
    """

    def __init__(self, callbacks: Sequence[Callback], make_policy: Callable[[Job], Any]):
        self._callbacks, self._make_policy = callbacks, make_policy
        self._names = [f"{index} {type(each).__name__}" for index, each in enumerate(callbacks)]
        self._job: Job | None = None
        self._attached = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_begun = False
        self._due: list[int] = []  # The step of the next `on_step` of each.
        self._states: dict[str, Any] = {}

    def __reduce__(self) -> Any:
        return Mailbox, ()

    def attach(self, job: Job) -> None:
        """Takes the job that was started, and the events of its monitor if that is in another process."""
        self._job = job
        self._attached.set()
        if job.status()["engine"] not in ("serial", "threads"):
            self._thread = threading.Thread(target=self._serve, args=(job,), name="callbacks", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def hosted(self) -> Iterator[None]:
        """A context of the program: at its end, all nodes have ended."""
        self._has_begun = False
        try:
            yield
        finally:
            if self._thread is not None:
                self._thread.join(_END_S)
            job, self._job, self._thread = self._job, None, None
            self._attached.clear()
            if job is not None and self._has_begun:
                for callback in self._callbacks:
                    callback.on_end(job.result)

    def begin(self, states: Mapping[str, Any]) -> None:
        """Tells the callbacks of the start; see `start`."""
        self.call("start", states)

    def call(self, event: str, *args: Any) -> dict[str, Any]:
        """Tells all callbacks of an event and returns their states. An error of one ends the program."""
        try:
            getattr(self, event)(*args)
            states = zip(self._names, (callback.save() for callback in self._callbacks), strict=True)
            self._states = {name: state for name, state in states if state is not None}
        except (Exception, SystemExit) as error:
            launch.stop(without_exit(error))
        return self._states

    def start(self, states: Mapping[str, Any]) -> None:
        """Gives the callbacks their states, and calls `on_start`, once: the monitor may be restarted."""
        if self._has_begun:
            return
        self._has_begun, self._due = True, [0] * len(self._callbacks)
        for name, callback in zip(self._names, self._callbacks, strict=True):
            callback._host = self
            if name in states:
                callback.restore(states[name])
            callback.on_start()

    def row(self, label: str, row: dict[str, Any], snapshot: dict[str, Any], evaluation: bool) -> None:
        steps = int(Clock(snapshot["clock"]).now(snapshot["counts"]))
        for index, callback in enumerate(self._callbacks):
            callback.on_row(label, dict(row), snapshot)
            if steps >= self._due[index]:
                self._due[index] = steps + callback.step_period
                callback.on_step(steps, snapshot)
        for callback in self._callbacks if evaluation else ():
            callback.on_evaluation(label, dict(row))

    def checkpoint(self, path: str) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(path)

    def close(self) -> None:
        """Called when the monitor closes."""

    def policy(self) -> Any:
        """See `Callback.policy`."""
        if not self._attached.wait(_END_S) or self._job is None:
            raise launch.LaunchError("policy: got no running program, since its nodes have ended.")
        return self._make_policy(self._job)

    def _serve(self, job: Job) -> None:
        """Takes the events one by one, and answers each with the states of the callbacks."""
        states: dict[str, Any] | None = None
        with job.entered():
            monitor = job.client("monitor")
            while True:
                try:
                    event = monitor.exchange_events(states, _POLL_S)
                except (launch.LaunchError, ValueError):  # The monitor is closed, or has failed.
                    return
                if event == ("close",):
                    return
                states = None if event is None else self.call(event[0], *event[1:])


class Mailbox:
    """Holds the event of the monitor until the launching process has taken and answered it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._event: tuple[Any, ...] | None = None
        self._states: dict[str, Any] = {}
        self._is_taken = self._is_closed = False

    def begin(self, states: Mapping[str, Any]) -> None:
        """Puts the first event, without waiting for the answer."""
        self._event, self._states = ("start", dict(states)), dict(states)

    def call(self, *event: Any) -> dict[str, Any]:
        """Puts an event, waits until it is answered, and returns the states. One thread may call it."""
        with self._changed:
            self._wait()  # The first event may not be answered yet.
            if not self._is_closed:
                self._event, self._is_taken = event, False
                self._changed.notify_all()
            self._wait()
            return self._states

    def _wait(self) -> None:
        if not self._changed.wait_for(lambda: self._event is None or self._is_closed, _LONGEST_S):
            raise TimeoutError(f"callbacks: got no end of {self._event} within {_LONGEST_S:g} s.")

    def exchange(self, states: dict[str, Any] | None, timeout: float) -> tuple[Any, ...] | None:
        """Takes the answer to the event before, and returns the next one; None after `timeout` seconds."""
        with self._changed:
            if self._is_taken and states is not None:
                self._event, self._is_taken, self._states = None, False, states
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._event is not None or self._is_closed, timeout)
            self._is_taken = self._event is not None
            return ("close",) if self._is_closed and self._event is None else self._event

    def close(self) -> None:
        """Ends the exchange."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
