"""What an actor node acts with: the parts of each way of inference, put together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import tree

import launch
from framework import core
from framework.actors import PolicyActor
from framework.actors.alternating import (
    AlternatingActor,
    AlternatingAdder,
    AlternatingEnvironment,
    AlternatingLoop,
)
from framework.actors.inference_client import InferenceActor, LocalPort, Port, connect
from framework.environment_loop import EnvironmentLoop
from framework.programs.run_config import RunConfig
from framework.programs.seeding import derive_seed
from framework.variables import VariableClient


class Acting(NamedTuple):
    """The parts that `ActorWorker` drives.

    Attributes:
      parts: how many steps of ``loop`` are one step of all envs.
      versioned: its ``version`` is that of the parameters that acted last; None without parameters.
    """

    environment: Any
    adder: Any
    actor: Any
    loop: Any
    parts: int
    versioned: Any
    close: Callable[[], None]


def make_acting(
    agent: core.Agent,
    make_environment: Any,
    spec: Any,
    config: RunConfig,
    *,
    replay: Any,
    learner: Any,
    inference: Any,
    name: str,
    seed: int,
) -> Acting:
    """Makes the parts for ``config.inference``; the arguments are those of `ActorWorker`."""
    mode, envs, update_period = config.inference, config.envs_per_actor, config.update_period
    alternating, served = mode.startswith("alternating"), mode.endswith("server")
    updates = agent.max_policy_lag is None
    make_adder = functools.partial(agent.make_adder, replay, spec) if replay is not None else lambda: None
    loop: Any
    adder: Any
    environment: Any
    if not (alternating or served):
        environment = make_environment(envs, seed)
        networks = agent.make_networks(spec)
        policy = agent.make_policy(networks)
        variables = _variable_client(learner, networks, policy, update_period)
        adder = make_adder()
        actor = PolicyActor(policy, adder, variables, envs, seed)
        loop = EnvironmentLoop(environment, actor, should_update=updates)
        return Acting(environment, adder, actor, loop, 1, variables, lambda: None)

    sizes = [envs - envs // 2, envs // 2] if alternating else [envs]
    offsets = [0, sizes[0]][: len(sizes)]
    environments = [
        make_environment(size, derive_seed(seed, f"half-{half}") if alternating else seed)
        for half, size in enumerate(sizes)
    ]
    close: Callable[[], None] = lambda: None  # noqa: E731
    ports: list[Port]
    if served:
        ports = [
            connect(inference, f"{name}.{half}", spec, size, offset, envs, config.inference_messages)
            for half, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
        ]
        has_variables = learner is not None
    else:
        networks = agent.make_networks(spec)
        policy = agent.make_policy(networks)
        policy.seed(seed)
        variables = _variable_client(learner, networks, policy, update_period)
        has_variables = variables is not None
        run = None
        if launch.get_node_context().engine != "serial":
            pool = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-inference")
            run, close = pool.submit, functools.partial(pool.shutdown, wait=True, cancel_futures=True)
        state = policy.initial_state(envs)
        ports = [
            LocalPort(policy, _envs_of(state, offset, size), variables, run)
            for size, offset in zip(sizes, offsets, strict=True)
        ]
    adders = [make_adder() for _ in sizes]
    actors = [
        InferenceActor(port, adder, size) for port, adder, size in zip(ports, adders, sizes, strict=True)
    ]
    # Halves share their parameters: one of them asks for newer ones, once per step of all envs.
    loops = [
        EnvironmentLoop(environment, actor, should_update=updates and half == 0)
        for half, (environment, actor) in enumerate(zip(environments, actors, strict=True))
    ]
    if not alternating:
        versioned = ports[0] if has_variables else None
        return Acting(environments[0], adders[0], actors[0], loops[0], 1, versioned, actors[0].close)
    in_step = agent.max_policy_lag is not None and learner is not None
    hold_every = len(sizes) * agent.unroll_length if in_step else None
    loop = AlternatingLoop(loops, actors, offsets, hold_every)
    adder = None
    if replay is not None:
        adder = AlternatingAdder(adders)
        adder.loop = loop
    both = AlternatingActor(actors)

    def close_all() -> None:
        both.close()
        close()

    environment = AlternatingEnvironment(environments)
    versioned = ports[0] if has_variables else None
    return Acting(environment, adder, both, loop, len(sizes), versioned, close_all)


def _variable_client(
    learner: Any, networks: Any, policy: core.Policy, update_period: int
) -> VariableClient | None:
    return None if learner is None else VariableClient(learner, networks, policy, update_period)


def _envs_of(state: Any, offset: int, size: int) -> Any:
    """The rows of some envs in a nest of ``[B, ...]``."""
    return tree.map_structure(lambda leaf: leaf[offset : offset + size], state)
