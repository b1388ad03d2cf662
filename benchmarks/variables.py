"""Parameters from one learner to many actors: what serving them costs the learner's process.

    python benchmarks/variables.py [--actors 64 256] [--seconds 8] [--versions-per-second 10]

A learner publishes versions of 6.8 MB of parameters (1.7M floats) at a fixed rate. Dummy actors, in a few
processes, look for a newer version twenty times a second and copy it. Ways:

- `shared memory`: the actors map the learner's block, as on one machine.
- `source, shared memory`: a variable source pulls each version by message, as on another machine; the actors
  of its machine map its copy.
- `source, messages`: the same, and the actors ask the source by message.
- `learner, messages`: the actors ask the learner by message, without a source.

Figures: CPU time of the learner's process in percent of one core, its publications included; versions that an
actor got per second; time from the publication until an actor has the parameters, median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from common import cpu_seconds
from dm_env import specs as dm_specs
from torch import nn

import launch
from agents.dqn import DQN, DQNConfig
from framework import specs
from framework.programs import RunConfig
from framework.variables import VariableBlock, VariableClient, Variables, shared_path
from framework.workers.variable_source import VariableSource
from framework.workers.worker import Setup, keep_freed_memory

NUM_PARAMETERS = 1_700_000
NUM_PROCESSES = 4  # Of actors: a process for each would measure the operating system.
PERIOD = 0.05  # Seconds between two looks of an actor.
WAYS = ("shared memory", "source, shared memory", "source, messages", "learner, messages")


class Policy(nn.Module):
    """Parameters that a dummy actor copies."""

    def __init__(self) -> None:
        super().__init__()
        self.q_network = nn.Linear(NUM_PARAMETERS // 1000, 1000, bias=False)


class Dummy(DQN):
    """An agent with these parameters."""

    def make_networks(self, spec: Any) -> Any:
        return Policy()

    def make_policy(self, networks: Any, evaluation: bool = False) -> Any:
        return argparse.Namespace(variables=("q_network",), progress=None)


class Learner:
    """Publishes versions with the time in their first entry."""

    def __init__(self, is_shared: bool, rate: float):
        torch.set_num_threads(1)
        keep_freed_memory()  # As `LearnerNode` does.
        networks = Policy()
        self._parameters = {"q_network": networks.q_network.state_dict()}
        self._block = VariableBlock(self._parameters, shared_path() if is_shared else None)
        self._rate = rate

    def variable_block(self) -> VariableBlock:
        return self._block

    def get_variables(self, names: Any = (), newer_than: int = -1, timeout: float = 0.0) -> Variables | None:
        return self._block.get_variables(names, newer_than, timeout)

    def cpu_seconds(self) -> float:
        return cpu_seconds()

    def run(self) -> None:
        version, stopped = 0, launch.stop_event()
        while not stopped.wait(1 / self._rate):
            self._parameters["q_network"]["weight"][0, 0] = _now()
            self._block.publish(version, self._parameters)
            version += 1


class Actors:
    """Several dummy actors in one process."""

    def __init__(self, source: Any, number: int, by_message: bool):
        torch.set_num_threads(1)
        self._clients = []
        for _ in range(number):
            networks = Policy()
            client = VariableClient(source, networks)
            if by_message:
                client._is_connected = True  # Does not ask for the block.
            self._clients.append((client, networks))
        self._updates, self._ages = 0, []

    def run(self) -> None:
        stopped = launch.stop_event()
        while not stopped.wait(PERIOD):
            for client, networks in self._clients:
                if client.update():
                    self._updates += 1
                    self._ages.append((_now() - networks.q_network.weight[0, 0].item()) % _TURN)

    def take(self) -> tuple[int, list[float]]:
        updates, self._updates = self._updates, 0
        ages, self._ages = self._ages, []
        return updates, ages


_TURN = 16.0  # Seconds after which the clock of the parameters begins again.


def _now() -> float:
    return time.monotonic() % _TURN


def _measure(learner: Any, actors: list[Any], seconds: float) -> None:
    stopped = launch.stop_event()
    while any(each.take()[0] == 0 for each in actors):  # Until each has parameters.
        if stopped.wait(0.5):
            return
    begin, started = learner.cpu_seconds(), time.perf_counter()
    for each in actors:
        each.take()
    stopped.wait(seconds)
    taken = [each.take() for each in actors]
    spent, elapsed = learner.cpu_seconds() - begin, time.perf_counter() - started
    ages = [age for _, some in taken for age in some]
    updates = sum(number for number, _ in taken)
    launch.stop((spent / elapsed, updates / elapsed, statistics.median(ages) if ages else np.nan))


def measure(way: str, num_actors: int, seconds: float, rate: float) -> tuple[float, float, float]:
    """CPU share of the learner, updates of all actors per second, and the median age of an update."""
    spec = specs.EnvironmentSpec(
        dm_specs.Array((4,), np.float32),
        dm_specs.DiscreteArray(2),
        dm_specs.Array((), np.float32),
        dm_specs.Array((), np.float32),
    )
    setup = Setup(Dummy(DQNConfig()), None, spec, RunConfig())  # type: ignore[arg-type]
    program = launch.Program("variables")
    learner = program.add_node(
        launch.CourierNode(Learner, is_shared=way == "shared memory", rate=rate), label="learner"
    )
    served = learner
    if way.startswith("source"):
        served = program.add_node(
            launch.CourierNode(VariableSource, setup, learner=learner), label="variable_source"
        )
    with program.group("actors"):
        actors = [
            program.add_node(
                launch.CourierNode(Actors, served, num_actors // NUM_PROCESSES, way.endswith("messages"))
            )
            for _ in range(NUM_PROCESSES)
        ]
    program.add_node(launch.PyNode(_measure, learner, actors, seconds), label="main")
    result: tuple[float, float, float] = launch.launch(program, engine="processes")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--actors", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--versions-per-second", type=float, default=10.0)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options = parser.parse_args()
    rate = options.versions_per_second
    print(f"{4e-6 * NUM_PARAMETERS:.1f} MB of parameters, {rate:g} versions a second")
    print(
        f"{'way':<24}{'actors':>8}{'learner, % of a core':>24}{'versions/s of an actor':>24}{'age, ms':>10}"
    )
    for way in options.ways:
        for actors in options.actors:
            cpu, updates, age = measure(way, actors, options.seconds, rate)
            print(f"{way:<24}{actors:>8}{100 * cpu:>24.1f}{updates / actors:>24.2f}{1000 * age:>10.1f}")


if __name__ == "__main__":
    main()
