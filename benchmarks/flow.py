"""Env steps per second of a plan over two workers with a dummy policy, beside the loop that it replaces.

    python benchmarks/flow.py [SECONDS]

A worker steps an environment of four numbers 100 times and returns the fragment as arrays.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import launch
from framework.flow import LocalNode, Node, Par, worker_node

STEPS = 100


class Environment:
    """Four numbers that an action moves; an episode has 200 steps."""

    def __init__(self) -> None:
        self.state = (0.0, 0.0, 0.0, 0.0)
        self.time = 0

    def step(self, action: int) -> tuple[tuple[float, ...], float, bool]:
        a, b, c, d = self.state
        self.time += 1
        self.state = (b, c, d, 0.9 * a + action)
        done = self.time % 200 == 0
        return self.state, 1.0, done


class Worker:
    """Collects fragments of 100 steps of a dummy policy."""

    def __init__(self, seed: int) -> None:
        self._environment = Environment()
        self._observation = self._environment.state

    def policy(self, observation: tuple[float, ...]) -> int:
        return int(observation[0] + observation[3] < 0.5)

    def sample(self) -> dict[str, np.ndarray]:
        observations, actions, rewards, dones = [], [], [], []
        for _ in range(STEPS):
            action = self.policy(self._observation)
            observations.append(self._observation)
            self._observation, reward, done = self._environment.step(action)
            actions.append(action)
            rewards.append(reward)
            dones.append(done)
        return {
            "observation": np.asarray(observations, np.float32),
            "action": np.asarray(actions),
            "reward": np.asarray(rewards, np.float32),
            "done": np.asarray(dones),
        }


def rate(take, seconds: float) -> float:
    for _ in range(20):
        take()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            take()
        count += 10
    return count * STEPS / (time.perf_counter() - began)


class Driver:
    """Measures a plan in a node of a program."""

    def __init__(self, seconds: float, depth: int, *clients: launch.NodeClient) -> None:
        self._seconds = seconds
        self._plan = Par([Node(client) for client in clients], Worker.sample).unordered(depth)

    def run(self) -> None:
        launch.stop(rate(self._plan.__next__, self._seconds))


def of_program(engine: str, seconds: float, depth: int) -> float:
    program = launch.Program("flow")
    with program.group("worker"):
        workers = [program.add_node(worker_node(Worker, seed)) for seed in range(2)]
    program.add_node(launch.PyClassNode(Driver, seconds, depth, *workers), label="driver")
    return launch.launch(program, engine=engine)


def main(seconds: float) -> None:
    workers = [Worker(0), Worker(1)]
    plan = Par([LocalNode(worker) for worker in workers], Worker.sample).unordered()
    loop, flow = [], []
    turn = 0

    def take() -> None:
        nonlocal turn
        turn = 1 - turn
        workers[turn].sample()

    for _ in range(3):
        loop.append(rate(take, seconds / 3))
        flow.append(rate(plan.__next__, seconds / 3))
    print(f"plain loop        {max(loop):10,.0f} steps/s")
    print(f"flow, in process  {max(flow):10,.0f} steps/s   {max(flow) / max(loop):.2f}")
    for depth in (0, 1, 2):
        print(f"processes, depth {depth} {of_program('processes', seconds, depth):9,.0f} steps/s")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 6.0)
