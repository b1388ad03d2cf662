"""`run`: a plan over workers as one call, without a program of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import launch
from framework.config_checks import whole_number
from framework.flow.nodes import Node, worker_node
from framework.flow.operators import Flow, NotReady


def run(
    worker: Callable[[int], Any],
    count: int,
    plan: Callable[[list[Node]], Iterable[Any]],
    *,
    items: int | None = None,
    engine: str = "serial",
) -> list[Any]:
    """Runs a plan over `count` workers and returns its items.

    ```python
    flow.run(Worker, 2, lambda nodes: Par(nodes, Worker.sample).sync().map(sum), items=10)
    ```

    Args:
      worker: makes the object of worker i, in its node: `worker(i)`.
      count: number of workers.
      plan: takes the workers' nodes and returns a `Flow`, or another iterable such as a generator. It is
        called once, in a node of its own.
      items: number of items to take; the program then stops. None takes all, of a plan that ends.
      engine: an engine of `launch.launch`.

    Raises:
      NodeError: A node failed. An error of a step is a `StepError`, its `__cause__`.
    """
    count = whole_number("count", count, 1)
    items = None if items is None else whole_number("items", items, 0)
    program = launch.Program("flow")
    with program.group("worker"):
        clients = [program.add_node(worker_node(worker, index)) for index in range(count)]
    program.add_node(launch.PyClassNode(_Driver, plan, items, *clients), label="plan")
    taken: list[Any] = launch.launch(program, engine=engine)
    return taken


class _Driver:
    """Takes the items, one per step, and ends the program with them."""

    def __init__(self, plan: Callable[[list[Node]], Iterable[Any]], items: int | None, *clients: Any):
        made = plan([Node(client, f"worker-{index}") for index, client in enumerate(clients)])
        self._ready = made.ready if isinstance(made, Flow) else lambda: True
        self._items, self._most, self._taken = iter(made), items, list[Any]()
        self._is_over = False

    def ready(self) -> bool:
        return self._is_full() or self._ready()

    def step(self) -> None:
        try:
            if not self._is_full():
                self._taken.append(next(self._items))
                return
        except NotReady:
            return  # It keeps what it has, and other branches have their turns.
        except StopIteration:
            pass
        self._is_over = True
        launch.stop(self._taken)

    def finished(self) -> bool:
        return self._is_over

    def run(self) -> None:
        while not launch.stop_event().is_set():
            self.step()

    def _is_full(self) -> bool:
        return self._most is not None and len(self._taken) >= self._most
