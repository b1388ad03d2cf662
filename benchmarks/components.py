"""What agents add to their components: to build them from specs, and to act through them.

    python -m benchmarks.components                                    # one thread of the CPU
    python -m benchmarks.components --envs 64 --seconds 2 dqn ppo

`built` is the time of `make_networks` beside that of torch's constructors of the same layers (linear,
convolution, cell of a memory, layer norm) and of its orthogonal initial weights; `beyond` is the difference.
`called` is the bare module, of tensors; `act` is what the agent makes of it (random numbers, choice, log
probabilities, the memory's state), and `step` is `Policy.step`, of arrays to arrays. The shares are those of
`called`. All ways take turns. Rows have medians of CPU seconds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn

from framework import specs
from framework.environments.testing import make_spec
from framework.networks import as_tensors
from framework.runs.registry import find_agent

CHOICE = dm_specs.DiscreteArray(6, np.int64)
VECTOR = make_spec(dm_specs.Array((17,), np.float32), CHOICE)
NUMBERS = make_spec(VECTOR.observations, dm_specs.BoundedArray((6,), np.float32, -1.0, 1.0))
IMAGES = make_spec(dm_specs.BoundedArray((84, 84, 4), np.uint8, 0, 255), CHOICE)
# Name of an agent, what it sees, and the call of a module that its policy makes.
CASES: dict[str, tuple[str, specs.EnvironmentSpec, Callable[..., Any]]] = {
    "dqn": ("dqn", VECTOR, lambda networks, seen, state: networks.q_network(seen)),
    "ppo": ("ppo", VECTOR, lambda networks, seen, state: networks.act(seen, state)),
    "sac": ("sac", NUMBERS, lambda networks, seen, state: networks.policy(seen)),
    "impala": ("impala", VECTOR, lambda networks, seen, state: networks.actor_critic.step(seen, state)),
    "r2d2": ("r2d2", VECTOR, lambda networks, seen, state: networks.q_network.step(seen, state)),
}
CASES |= {f"{name}, images": (name, IMAGES, CASES[name][2]) for name in ("dqn", "ppo", "impala", "r2d2")}


def in_turns(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """The median CPU seconds of each call."""
    taken: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[0]) < 3:
        for call, each in zip(calls, taken, strict=True):
            started = time.thread_time()
            call()
            each.append(time.thread_time() - started)
    return [statistics.median(each) for each in taken]


def makers(make: Callable[[], nn.Module]) -> list[Callable[[], Any]]:
    """What makes the layers of networks, and their orthogonal weights, by torch alone."""
    made: list[Callable[[], Any]] = []
    with mock.patch("torch.nn.init.orthogonal_", wraps=nn.init.orthogonal_) as orthogonal:
        networks = make()
    for call in orthogonal.call_args_list:
        made.append(functools.partial(nn.init.orthogonal_, torch.empty(call.args[0].shape)))
    for layer in networks.modules():
        bias = getattr(layer, "bias", None) is not None
        if isinstance(layer, nn.Linear):
            made.append(functools.partial(nn.Linear, layer.in_features, layer.out_features, bias))
        elif isinstance(layer, nn.Conv2d):
            kernel: Any = layer.kernel_size
            made.append(
                functools.partial(nn.Conv2d, layer.in_channels, layer.out_channels, kernel, bias=bias)
            )
        elif isinstance(layer, nn.LSTMCell | nn.GRUCell):
            made.append(functools.partial(type(layer), layer.input_size, layer.hidden_size))
        elif isinstance(layer, nn.LayerNorm):
            made.append(functools.partial(nn.LayerNorm, layer.normalized_shape))
    return made


def row(name: str, envs: int, seconds: float) -> str:
    agent_name, spec, call = CASES[name]
    agent: Any = find_agent(agent_name).make().for_program(envs)
    networks = agent.make_networks(spec)
    layers = makers(lambda: agent.make_networks(spec))
    ours, torchs = in_turns([lambda: agent.make_networks(spec), lambda: [make() for make in layers]], seconds)
    policy: Any = agent.make_policy(networks)
    leaves = tree.map_structure(
        lambda leaf: np.full((envs, *leaf.shape), 1, leaf.dtype),
        spec.observations,
    )
    seen, state = as_tensors(leaves), policy.initial_state(envs)
    memory = agent.has_memory and networks_state(networks, envs)

    def bare() -> None:
        with torch.inference_mode():
            call(networks, policy.scaled(seen), memory or ())

    def act() -> None:
        with torch.inference_mode():
            policy.act(policy.scaled(seen), state)

    with policy.settings:  # As the nodes of a program have them.
        called, chosen, acted = in_turns([bare, act, lambda: policy.step(leaves, state)], seconds)
    return (
        f"| {name} | {1e3 * ours:.2f} | {1e3 * torchs:.2f} | {1e3 * (ours - torchs):.2f} "
        f"| {1e6 * called:.0f} | {100 * (chosen / called - 1):.0f} % | {100 * (acted / called - 1):.0f} % |"
    )


def networks_state(networks: Any, envs: int) -> Any:
    """The state of the memory of `networks`."""
    (part,) = (each for each in networks.children() if hasattr(each, "initial_state"))
    return part.initial_state(envs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| components | built, ms | by torch | beyond | called, µs | act | step |")
    print("|---|---|---|---|---|---|---|")
    for name in given.cases:
        print(row(name, given.envs, given.seconds), flush=True)


if __name__ == "__main__":
    main()
