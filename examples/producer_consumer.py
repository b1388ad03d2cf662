"""Producers make numbers, a consumer adds them up: the smallest program with a service and workers.

    python examples/producer_consumer.py [serial | threads | processes]

The consumer asks every producer for a batch of work and waits for the futures; when it has enough it ends the
program with a result.
"""

from __future__ import annotations

import sys
from typing import Any

import launch as lp


class Producer:
    """A service: it has no `run`, so it only answers."""

    def __init__(self, seed: int) -> None:
        self._next = seed

    def produce(self, count: int) -> list[int]:
        """The next `count` numbers."""
        numbers = list(range(self._next, self._next + count))
        self._next += count
        return numbers


class Consumer:
    """A worker: its `run` is called, or `step` again and again where there is one thread only."""

    def __init__(self, producers: list[Any], enough: int) -> None:
        self._producers = producers  # handles outside, clients in here
        self._enough = enough
        self._total = 0
        self._count = 0

    def ready(self) -> bool:
        """Whether `step` would go through without blocking: producers always answer."""
        return True

    def step(self) -> None:
        """One batch from every producer, asked for at the same time."""
        futures = [producer.futures.produce(10) for producer in self._producers]
        for future in futures:
            numbers = future.result()
            self._total += sum(numbers)
            self._count += len(numbers)
        if self._count >= self._enough:
            lp.stop({"total": self._total, "count": self._count})

    def run(self) -> None:
        while not lp.stop_event().is_set():
            self.step()


def make_program(num_producers: int = 3, enough: int = 90) -> lp.Program:
    """A consumer and its producers."""
    program = lp.Program("producer_consumer")
    with program.group("producer"):
        producers = [
            program.add_node(lp.CourierNode(Producer, seed=1000 * index)) for index in range(num_producers)
        ]
    program.add_node(lp.CourierNode(Consumer, producers, enough), label="consumer")
    return program


if __name__ == "__main__":
    print(lp.launch(make_program(), engine=sys.argv[1] if len(sys.argv) > 1 else "processes"))
