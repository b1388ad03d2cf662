"""What ``scaling.py`` runs: real services of programs, calls that load one of them, and dummy actors.

Every service is the node that programs have. A load repeats one call of an actor, of a learner or of an
evaluator. A dummy actor is a real `ActorWorker` with a real adder and a real variable client; only its
environment and its policy compute nothing, and a step of the environment waits until it is due.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import dm_env
import numpy as np
import torch
from dm_env import specs as dm_specs
from torch import nn

import launch
from agents.random_actions import RandomActions, RandomPolicy
from benchmarks.common import cpu_seconds
from framework import replay, specs
from framework.actors.inference_client import ServerPort
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment
from framework.parameters import NamedArrays
from framework.programs import RunConfig
from framework.runs.services import Counter, Monitor
from framework.variables import VariableBlock, Variables
from framework.workers.actor_worker import ActorWorker
from framework.workers.inference_worker import InferenceWorker
from framework.workers.worker import Setup, keep_freed_memory
from launch.engines.options import Options
from launch.engines.processes import ProcessesJob
from launch.engines.supervised.node_process import _free_port

EPISODE = 1000  # Steps.
BATCH = 256  # Items that a learner draws at a time.
_START_S = 120.0  # Limit of waits for a start.


class Shape(NamedTuple):
    """What actors send and read.

    Attributes:
      observation: the spec of an observation.
      action: the spec of an action.
      parameters: number of float32 parameters that a policy reads.
    """

    observation: specs.Array
    action: specs.Array
    parameters: int

    @property
    def spec(self) -> specs.EnvironmentSpec:
        scalar = dm_specs.Array((), np.float32)
        return specs.EnvironmentSpec(
            self.observation, self.action, scalar, dm_specs.BoundedArray((), np.float32, 0.0, 1.0)
        )


# Four frames of Pong and the network of DQN; HalfCheetah and SAC's policy of two layers of 256 units.
SHAPES = {
    "atari": Shape(
        specs.StackedBoundedArray((4, 84, 84), np.uint8, 0, 255), dm_specs.DiscreteArray(6), 1_700_000
    ),
    "mujoco": Shape(
        dm_specs.Array((17,), np.float32), dm_specs.BoundedArray((6,), np.float32, -1.0, 1.0), 73_500
    ),
}


class DummyNetworks(nn.Module):
    """Parameters that are copied and not used."""

    def __init__(self, size: int, actions: specs.Array):
        super().__init__()
        self.policy = nn.Linear(size // 100, 100, bias=False)
        self.actions = actions


class DummyPolicy(RandomPolicy):
    """Always the same action."""

    variables = ("policy",)

    def _draw(self, spec: Any, envs: int) -> np.ndarray:
        return np.zeros((envs, *spec.shape), spec.dtype)


class Dummy(RandomActions):
    """An agent whose actors compute nothing. Nobody waits for anybody in its replay."""

    def __init__(self, shape: Shape):
        super().__init__()
        self._shape = shape

    def make_networks(self, spec: specs.EnvironmentSpec) -> Any:
        return DummyNetworks(self._shape.parameters, spec.actions)

    def make_policy(self, networks: Any, evaluation: bool = False) -> DummyPolicy:
        return DummyPolicy(networks.actions)

    def make_tables(self, spec: specs.EnvironmentSpec) -> list[replay.Table]:
        selectors, limiter = replay.selectors, replay.rate_limiters.MinSize(1)
        return [replay.Table("replay", selectors.Uniform(), selectors.Fifo(), 20_000, limiter, seed=0)]


class Paced(BatchedEnvironment):
    """Steps 0.5 to 1.5 times `rate` times a second, by `seed`, or at once if `rate` is None. All is zeros."""

    name = "paced"

    def __init__(self, spec: specs.EnvironmentSpec, num_envs: int, seed: int, rate: float | None = None):
        self.spec, self.num_envs = spec, num_envs
        self._never, self._time = threading.Event(), 0
        draw = np.random.default_rng(seed).random  # Actors must not stay in step with each other.
        self._period = 0.0 if rate is None else 1 / (rate * (0.5 + draw()))
        self._due = time.monotonic() + self._period * draw()
        observation = np.zeros((num_envs, *spec.observations.shape), spec.observations.dtype)
        zeros, ones = np.zeros(num_envs, np.float32), np.ones(num_envs, np.float32)
        self._steps = {
            kind: dm_env.TimeStep(np.full(num_envs, kind), zeros, ones, observation)
            for kind in (FIRST, MID, LAST)
        }

    def reset(self) -> dm_env.TimeStep:
        self._time = 0
        return self._steps[FIRST]

    def step(self, action: Any) -> dm_env.TimeStep:
        if self._period:
            self._never.wait(max(0.0, self._due - time.monotonic()))
            self._due = max(self._due + self._period, time.monotonic() - 1.0)
        self._time = (self._time + 1) % (EPISODE + 1)
        return self._steps[LAST if self._time == EPISODE else MID if self._time else FIRST]

    def close(self) -> None:
        pass


def make_setup(shape: Shape, rate: float | None = None, **config: Any) -> Setup:
    """What dummy actors are made from; `rate` is of their batched steps per second."""
    make = functools.partial(Paced, shape.spec, rate=rate)
    return Setup(Dummy(shape), make, shape.spec, RunConfig(evaluate_period=None, **config))


class Source:
    """A variable source, as clients on other machines see it: it publishes `rate` versions a second."""

    def __init__(self, shape: Shape, rate: float):
        torch.set_num_threads(1)
        keep_freed_memory()  # As learners do.
        networks = DummyNetworks(shape.parameters, shape.action)
        self._parameters = NamedArrays(networks, ("policy",)).arrays
        self._block, self._rate = VariableBlock(self._parameters), rate
        self._block.publish(0, self._parameters)
        self._copies = 0

    def variable_block(self) -> None:
        return None

    def copies(self) -> int:
        """Number of copies of the parameters that it has sent."""
        return self._copies

    def get_variables(self, names: Any = (), newer_than: int = -1, timeout: float = 0.0) -> Variables | None:
        found = self._block.get_variables(names, newer_than)
        self._copies += found is not None
        return found

    def run(self) -> None:
        stopped, version = launch.stop_event(), 0
        while not stopped.wait(1 / self._rate):
            version += 1
            self._block.publish(version, self._parameters)


# The calls of loads. Each takes the client of the service, the shape and the number of envs, and returns the
# call and what it moves: messages, and bytes of arrays.


def grants(counter: Any, shape: Shape, envs: int, who: str) -> Callable[[], Any]:
    state = {"spent": 0}

    def call() -> None:
        state["spent"] = counter.grant(who, 64 * envs, spent=state["spent"], actor_episodes=1)

    return call


def rows(monitor: Any, shape: Shape, envs: int, who: str) -> Callable[[], Any]:
    names = ("steps", "env_steps", "episodes", "episode_return", "episode_return_min", "episode_return_max")
    names += ("episode_length", "variables_version", "acting_staleness", "time/reset_s", "time/step_s")
    row = dict.fromkeys(names, 1.0)
    return lambda: monitor.write(who, row)


def looks(source: Any, shape: Shape, envs: int, who: str) -> Callable[[], Any]:
    return lambda: source.get_variables(("policy",), newer_than=10**9)


def copies(source: Any, shape: Shape, envs: int, who: str) -> Callable[[], Any]:
    return lambda: source.get_variables(("policy",), newer_than=-1)


def inserts(client: Any, shape: Shape, envs: int, who: str) -> Callable[[], Any]:
    setup = make_setup(shape)
    adder, environment = setup.agent.make_adder(client, shape.spec), setup.make_environment(envs, 0)
    action = np.zeros((envs, *shape.action.shape), shape.action.dtype)
    adder.add_first(environment.reset())

    def call() -> None:
        adder.add(action, environment.step(action))
        adder.flush_pending()
        adder.flush()

    return call


def samples(client: Any, shape: Shape, envs: int, who: str) -> Callable[[], Any]:
    inserts(client, shape, BATCH, who)()
    source, state = client.source(), {}

    def call() -> None:
        if state:
            source.release(state["drawn"])
        _, state["drawn"] = source.draw("replay", BATCH, None, None, False)

    return call


def actions(server: Any, shape: Shape, envs: int, who: str) -> Callable[[], Any]:
    port = ServerPort(server, who, envs)
    observation = np.zeros((envs, *shape.observation.shape), shape.observation.dtype)
    first = np.zeros(envs, np.bool_)

    def call() -> None:
        port.request(observation, first)
        port.answer()

    return call


class Load:
    """Repeats calls of services, in a process of its own."""

    def __init__(self, shape: Shape, services: dict[str, Any]):
        self._shape, self._services = shape, services
        self._calls: dict[tuple[str, int, int], Callable[[], Any]] = {}
        self._name = launch.get_node_context().label + f"-{launch.get_node_context().index}"
        self._threads = concurrent.futures.ThreadPoolExecutor(64)

    def drive(self, name: str, envs: int, seconds: float, rate: float | None = None, callers: int = 1) -> int:
        """Calls `name` of `CALLS` for some seconds; returns the number of calls.

        Args:
          name: of the call.
          envs: number of envs in a call.
          seconds: the time.
          rate: calls per second of all callers together; None calls as fast as they can.
          callers: number of threads that call, each one call after the other.
        """
        share = None if rate is None else rate / callers
        parts = [self._threads.submit(self._drive, name, envs, seconds, share, k) for k in range(callers)]
        return sum(part.result() for part in parts)

    def _drive(self, name: str, envs: int, seconds: float, rate: float | None, caller: int) -> int:
        kind, make = CALLS[name]
        call = self._calls.get((name, envs, caller))
        if call is None:
            who = f"{self._name}-{envs}-{caller}"
            call = self._calls[name, envs, caller] = make(self._services[kind], self._shape, envs, who)
            call()
        calls, never, due = 0, threading.Event(), time.monotonic()
        end = due + seconds
        if rate is not None:
            due += random.random() * min(1 / rate, seconds)  # Callers are not in step.
        while calls == 0 or (due < end and time.monotonic() < end):
            if rate is not None:
                never.wait(max(0.0, due - time.monotonic()))
                due += 1 / rate
            call()
            calls += 1
        return calls


# By name: the service, and what makes the call.
CALLS = {
    "grant": ("counter", grants),
    "row": ("monitor", rows),
    "look": ("source", looks),
    "copy": ("source", copies),
    "insert": ("replay", inserts),
    "sample": ("replay", samples),
    "act": ("inference", actions),
}


class FarInference(InferenceWorker):
    """Offers no line to actors on its machine."""

    def connect(self, *args: Any) -> Any:
        return super().connect(*args)._replace(folder=None)


class FarJob(ProcessesJob):
    """On another machine, as far as one can show it: TCP with CURVE, and arrays in messages."""

    def _find_entries(self, folder: str | None) -> Any:
        entries = super()._find_entries(folder)
        tcp = [f"tcp://127.0.0.1:{_free_port('127.0.0.1')}" for _ in entries]
        return {
            node: dataclasses.replace(entry, address=address)
            for (node, entry), address in zip(entries.items(), tcp, strict=True)
        }


serve_node = replay.serve_node


def connect_node(address: str, curve: Any = None) -> Any:
    """A replay client that maps no memory of the server, for `ReplayNode(backend=__name__)`."""
    client = replay.Client(address, curve=curve, local=False)
    launch.register_stop_handler(client.interrupt)
    return client


class Services:
    """The services of a program that runs, and nodes that load them, as a context.

    Args:
      shape: what is sent.
      far: whether the services are reached as from another machine.
      loads: number of processes that load them.
      actors: dummy actors, in `processes` processes.
      rate: batched steps of each of them per second.
      versions: versions of the parameters per second.
      config: further settings of the actors.
    """

    def __init__(
        self,
        shape: Shape,
        far: bool = False,
        loads: int = 4,
        actors: int = 0,
        processes: int = 4,
        rate: float = 0.0,
        versions: float = 1.0,
        **config: Any,
    ):
        program = launch.Program("scaling")
        tables = functools.partial(Dummy(shape).make_tables, shape.spec)
        acting = make_setup(shape, num_actors=64, envs_per_actor=16)
        nodes = {
            "replay": launch.ReplayNode(tables, backend=__name__ if far else "framework.replay"),
            "counter": launch.CourierNode(Counter),
            "monitor": launch.CourierNode(Monitor),
            "source": launch.CourierNode(Source, shape, versions),
        }
        services = {label: program.add_node(node, label=label) for label, node in nodes.items()}
        if not actors:
            server = FarInference if far else InferenceWorker
            node = launch.CourierNode(server, acting, learner=None, monitor=services["monitor"])
            services["inference"] = program.add_node(node, label="inference")
        with program.group("load"):
            for _ in range(loads):
                program.add_node(launch.CourierNode(Load, shape, services))
        setup = make_setup(shape, rate, num_actors=actors or 1, **config)
        handles = {"replay": services["replay"], "learner": services["source"]}
        handles |= {label: services[label] for label in ("counter", "monitor")}
        share = max(1, -(-actors // processes))
        with program.group("actor"):
            for first in range(0, actors, share):
                numbers = range(first, min(actors, first + share))
                workers = [
                    launch.PyClassNode(ActorWorker, setup, index=index, seed=index, **handles)
                    for index in numbers
                ]
                program.add_node(launch.MultiThreadingColocation(workers))
        self._program, self._far, self._loads = program, far, loads

    def __enter__(self) -> Services:
        start = FarJob(self._program, "processes", Options()) if self._far else launch.start(self._program)
        self.job = start.__enter__()
        self.clients = [self.job.client("load", index) for index in range(self._loads)]
        return self

    def __exit__(self, *error: Any) -> None:
        self.job.__exit__(*error)

    def cpu(self) -> Any:
        """CPU seconds of every group of nodes so far."""
        spent: Any = collections.Counter()
        for pid, group in {node["pid"]: node["group"] for node in self.job.nodes()}.items():
            spent[group] += cpu_seconds(pid)
        return spent

    def drive(self, name: str, envs: int, seconds: float, rate: float | None = None, callers: int = 1) -> int:
        """All loads call `name`, each with its share of `rate`; returns the number of calls: `Load.drive`."""
        share = None if rate is None else rate / self._loads
        futures = [client.futures.drive(name, envs, seconds, share, callers) for client in self.clients]
        return sum(future.result(_START_S + seconds) for future in futures)

    def measure(
        self, name: str, envs: int = 1, seconds: float = 1.0, rate: float | None = None, callers: int = 1
    ) -> Cost:
        """The cost of one call, while the loads make no other."""
        self.drive(name, envs, 0.2, rate, callers)
        before, began = self.cpu(), time.perf_counter()
        calls = self.drive(name, envs, seconds, rate, callers)
        elapsed, spent = time.perf_counter() - began, self.cpu()
        spent.subtract(before)
        return Cost(spent[CALLS[name][0]] / calls, spent["load"] / calls, calls / elapsed)


class Cost(NamedTuple):
    """What a call costs.

    Attributes:
      service: CPU seconds of the service's process, all its threads.
      caller: CPU seconds of the caller's process.
      rate: calls per second of all loads together, by the clock.
    """

    service: float
    caller: float
    rate: float
