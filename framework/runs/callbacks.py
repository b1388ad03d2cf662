"""Callbacks: code of an application that the monitor calls after events of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Callback:
    """Called after events of a run, one call at a time. Override the methods that you need.

    ```python
    class Enough(Callback):
        def on_evaluation(self, label, row):
            if row["episode_return_min"] >= 400:
                launch.stop({"reason": "enough", **row})             # what launch.launch() returns

    program = make_program(agent, environment, config, callbacks=[Enough()])
    ```

    An exception ends the run, and `launch.launch` raises it. The calls run in the monitor's process. On an
    engine with several processes the object there is a pickled copy, so the caller does not see changes to
    its attributes, and an Optuna study needs a database. The node that caused the event waits for the call.
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


class OnWrite(Callback):
    """The callback that calls `function(snapshot)` after each row: `make_program(..., on_write=function)`."""

    def __init__(self, function: Callable[[dict[str, Any]], None]):
        self.function = function

    def on_row(self, label: str, row: dict[str, Any], snapshot: dict[str, Any]) -> None:
        self.function(snapshot)
