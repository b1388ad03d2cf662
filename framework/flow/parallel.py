"""`Par`: one stream of items per node, whose steps run where the nodes are."""

from __future__ import annotations

import collections
import functools
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import launch
from framework.flow.nodes import Node, Step, StepError
from framework.flow.operators import Flow


class Par:
    """Items of several nodes, in parallel: item k of a node is `step(object)`, computed in the node.

    Args:
      nodes: the nodes, at least one.
      step: a function of the node's object, such as a method of its class: `Worker.sample`.
    """

    def __init__(self, nodes: Sequence[Node], step: Step) -> None:
        if not nodes:
            raise ValueError("Par(nodes): got none, expected at least one.")
        self._nodes = list(nodes)
        self._step = step

    def map(self, step: Step) -> Par:
        """Applies `step(object, item)` to each item, in the node that made it."""
        return Par(self._nodes, functools.partial(_then, self._step, step))

    def sync(self) -> Flow:
        """Returns rounds: lists of one item per node, in the order of the nodes.

        A round begins when it is asked for. A node's item reflects everything that was sent to the node
        before that.
        """

        def take() -> list[Any]:
            calls = [node.call(self._step) for node in self._nodes]
            for i, node in enumerate(self._nodes):
                while _is_lost(calls[i]):
                    calls[i] = node.call(self._step)
            return [self._result(node, call, True) for node, call in zip(self._nodes, calls, strict=True)]

        return Flow(take)

    def unordered(self, depth: int = 0, source: bool = False) -> Flow:
        """Returns items as they become ready.

        An item is *in hand* until the next one is asked for. Meanwhile its node works on `depth` further
        items. With 0, the next item of that node reflects everything that you send to it while its item is in
        hand.

        Args:
          depth: number of requests in flight behind the item in hand, at least 0.
          source: whether items are pairs `(node, item)`.
        """
        if depth < 0:
            raise ValueError(f"depth: got {depth}, expected at least 0.")
        ready: queue.SimpleQueue[tuple[Node, Future]] = queue.SimpleQueue()
        due = collections.deque([*self._nodes] * (1 + depth))

        def take() -> Any:
            while True:
                while due:
                    call = due[0].call(self._step)
                    node = due.popleft()  # only now: a call that failed stays due
                    call.add_done_callback(functools.partial(_put, ready, node))
                node, call = ready.get()  # Ends: the engine settles every call, at the latest when it stops.
                due.append(node)
                if not _is_lost(call):
                    item = self._result(node, call)
                    return (node, item) if source else item

        return Flow(take)

    def _result(self, node: Node, call: Future, round_ended: bool = False) -> Any:
        try:
            return call.result()
        except launch.ProgramStopped:
            raise
        except Exception as error:
            name = getattr(self._step, "__qualname__", repr(self._step))
            text = f"{node.name}: {name}: {type(error).__name__}: {error}"
            raise StepError(text, node.name, round_ended) from error


def _is_lost(call: Future) -> bool:
    """Waits for a call. Returns whether it was lost with the node's object and has to be made again."""
    return isinstance(call.exception(), launch.CallLost)


def _then(first: Step, second: Step, obj: Any) -> Any:
    """Two steps as one."""
    return second(obj, first(obj))


def _put(ready: queue.SimpleQueue[tuple[Node, Future]], node: Node, call: Future) -> None:
    ready.put((node, call))
