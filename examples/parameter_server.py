"""A parameter server: workers compute gradients of a least-squares problem, one server applies them.

    python examples/parameter_server.py [serial | threads | processes]

Shows a service with state, arrays as arguments, and a result that ends the program.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

import launch as lp

TRUE_WEIGHTS = np.array([1.0, -2.0, 0.5])


class ParameterServer:
    """Holds the parameters; ends the program when they have been updated often enough."""

    def __init__(self, learning_rate: float, updates: int) -> None:
        self._weights = np.zeros(3)
        self._learning_rate = learning_rate
        self._updates = updates
        self._lock = threading.Lock()  # calls of several workers may be carried out at the same time

    def parameters(self) -> np.ndarray:
        """float64[3]"""
        return self._weights

    def apply(self, gradient: np.ndarray) -> None:
        """Takes one step along float64[3]."""
        with self._lock:
            self._weights = self._weights - self._learning_rate * gradient
            self._updates -= 1
            if self._updates == 0:
                lp.stop(self._weights)


class Worker:
    """Draws data of its own and sends gradients."""

    def __init__(self, server: Any, seed: int) -> None:
        self._server = server
        self._random = np.random.default_rng(seed)

    def ready(self) -> bool:
        return True

    def step(self) -> None:
        weights = self._server.parameters()
        inputs = self._random.normal(size=(32, 3))
        errors = inputs @ weights - inputs @ TRUE_WEIGHTS
        self._server.apply(2.0 * inputs.T @ errors / len(inputs))

    def run(self) -> None:
        while not lp.stop_event().is_set():
            self.step()


def make_program(num_workers: int = 2, updates: int = 300) -> lp.Program:
    """One server, several workers."""
    program = lp.Program("parameter_server")
    server = program.add_node(lp.CourierNode(ParameterServer, 0.05, updates), label="server")
    with program.group("worker"):
        for seed in range(num_workers):
            program.add_node(lp.CourierNode(Worker, server, seed))
    return program


if __name__ == "__main__":
    print(lp.launch(make_program(), engine=sys.argv[1] if len(sys.argv) > 1 else "processes"))
