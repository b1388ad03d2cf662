"""Learner steps per second, beside loops written in plain torch, on data that lies on the device already.

    python -m benchmarks.learner.step                                  # one thread of the CPU
    python -m benchmarks.learner.step --device cuda --ways eager cuda_graph compile leanrl group
    python -m benchmarks.learner.step --device cuda --processes 2      # learners that average gradients

DQN and IMPALA (with the layers of Nature and with the deep ones) learn at the shapes of Atari, PPO, SAC and
TD3 at those of HalfCheetah. The loops have the agents' networks and distributions; their losses, targets and
optimizers are plain torch. `eager` is `Learner.step` on the same batch, `group` the same in a group of one
process (gloo, on GPUs NCCL); `compile`, `cuda_graph` and `autocast` are the learner with that field of
the config. `leanrl` is the loop as LeanRL has it: compiled by torch, then captured by tensordict's
`CudaGraphModule`; it reads the batch where it lies.

The loop and a way take turns. A row has the medians of both, and the ratio is one divided by the other.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn

from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from agents.sac import SAC, SACConfig
from agents.td3 import TD3, TD3Config
from benchmarks.learner.loops import LOOPS, Loop, leanrl
from framework import specs
from framework.learners import LearnerGroup
from framework.networks import as_tensors
from framework.replay import ReplaySample
from framework.types import Step, Transition

ATARI = (
    dm_specs.BoundedArray((84, 84, 4), np.uint8, 0, 255),
    dm_specs.DiscreteArray(6),
)
HALF_CHEETAH = (
    dm_specs.Array((17,), np.float32),
    dm_specs.BoundedArray((6,), np.float32, -1.0, 1.0),
)


# The ways of the learner: with which fields of the config, and whether in a group.
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "group": {},
    "compile": {"step_mode": "compile"},
    "cuda_graph": {"step_mode": "cuda_graph"},
    "autocast": {"autocast": True},
    "leanrl": {},
}


def make_agent(name: str, tiny: bool, **fields: Any) -> Any:
    if name == "dqn":
        return DQN(DQNConfig(batch_size=2 if tiny else 32, **fields))
    if name.startswith("impala"):
        fields["torso"] = "deep" if name == "impala_deep" else "nature"
        sizes: dict[str, Any] = (
            {"batch_size": 2, "unroll_length": 3} if tiny else {"batch_size": 32, "unroll_length": 20}
        )
        return IMPALA(IMPALAConfig(**sizes, **fields))
    if name == "ppo":
        sizes = {"unroll_length": 8, "epochs": 2, "minibatch_size": 8}
        if not tiny:
            sizes = {"unroll_length": 128, "epochs": 10, "minibatch_size": 256}
        return PPO(PPOConfig(**sizes, **fields))
    size = 2 if tiny else 256
    return (SAC if name == "sac" else TD3)(
        (SACConfig if name == "sac" else TD3Config)(batch_size=size, **fields)
    )


def make_spec(name: str) -> specs.EnvironmentSpec:
    observations, actions = ATARI if name in ("dqn", "impala", "impala_deep") else HALF_CHEETAH
    return specs.EnvironmentSpec(
        observations, actions, dm_specs.Array((), np.float32), dm_specs.BoundedArray((), np.float32, 0, 1)
    )


def make_batch(agent: Any, spec: specs.EnvironmentSpec, envs: int, device: str) -> ReplaySample:
    """Random experience on the device: transitions, or unrolls whose last row is there to bootstrap from."""
    random = np.random.default_rng(0)
    size = envs if isinstance(agent, PPO) else agent.config.batch_size
    policy = agent.make_policy(agent.make_networks(spec))

    def observe() -> np.ndarray:
        shape = (size, *spec.observations.shape)
        if spec.observations.dtype == np.uint8:
            return random.integers(0, 256, shape, np.uint8)
        return random.normal(size=shape).astype(np.float32)

    rows: list[Any] = []
    on_policy = isinstance(agent, (PPO, IMPALA))
    for t in range(agent.config.unroll_length + 1 if on_policy else 1):
        observation = observe()
        action, extras, _ = policy.step(observation, policy.initial_state(size))
        reward = random.normal(size=size).astype(np.float32)
        discount = (random.random(size) < 0.98).astype(np.float32)
        if on_policy:
            real = np.full(size, float(t < agent.config.unroll_length), np.float32)
            rows.append(
                Step(observation, action, reward * real, discount * real, np.zeros(size, bool), extras, real)
            )
        else:
            rows.append(Transition(observation, action, reward, discount, observe()))
    data = tree.map_structure(lambda *leaves: np.stack(leaves, 1), *rows) if on_policy else rows[0]
    info: Any = None
    return ReplaySample(info, as_tensors(data, device))


def make_loops(
    name: str,
    device: str,
    tiny: bool,
    ways: Sequence[str] = ("eager", "group"),
    rank: int = 0,
    store: Any = None,
) -> tuple[dict[str, Loop], dict[str, nn.Module], list[LearnerGroup]]:
    """The ways to make a step, plain torch first, their networks, which begin equal, and open groups.

    With a `store`, the group is this process, of this rank, and another one.
    """
    spec, envs = make_spec(name), 2 if tiny else 16
    agent = make_agent(name, tiny, device=device).for_program(envs)
    torch.manual_seed(0)
    networks = agent.make_networks(spec).to(device)
    batch = make_batch(agent, spec, envs, device)
    modules = {"torch": networks, **{way: copy.deepcopy(networks) for way in ways}}
    loops, groups = {"torch": LOOPS[name](agent, networks, batch)}, []
    for way in ways:
        if way == "leanrl":
            loops[way] = LOOPS[name](agent, modules[way], batch, leanrl)
            continue
        own = make_agent(name, tiny, device=device, **WAYS[way]).for_program(envs)
        learner = own.make_learner(modules[way], spec)
        if way == "group":
            size, store = (1, torch.distributed.HashStore()) if store is None else (2, store)
            groups.append(LearnerGroup(rank, size, store, learner.device))
            learner.distribute(groups[0])
        loops[way] = functools.partial(learner.step, batch)
    return loops, modules, groups


def rate(step: Loop, seconds: float, device: str) -> float:
    """Steps per second on the clock of a GPU, or per CPU-second."""
    cuda = torch.device(device).type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    made, begin = 0, clock()
    while clock() - begin < seconds:
        step()
        made += 1
    if cuda:
        torch.cuda.synchronize()
    return made / (clock() - begin)


def measure(name: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row: the steps per second of the way and of the loop beside it; or why there are none."""
    row: dict[str, Any] = {"row": f"{name}, {way}"}
    groups: list[LearnerGroup] = []
    try:
        loops, _, groups = make_loops(name, options.device, options.tiny, [way])
        begin = time.perf_counter()
        for step in loops.values():
            for _ in range(2):  # They compile and capture; TD3 has two kinds of steps.
                step()
            rate(step, options.seconds, options.device)
        row["note"] = f"first steps of both: {time.perf_counter() - begin:.1f} s"
        pairs = [
            [rate(step, options.seconds, options.device) for step in loops.values()]
            for _ in range(options.turns)
        ]
        row["of"] = "the loop in plain torch"
        row["of_value"], row["value"] = (statistics.median(turn) for turn in zip(*pairs, strict=True))
    except Exception as error:
        row["note"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    for group in groups:
        group.close()
    return row


def member(rank: int, path: str, name: str, device: str, tiny: bool, steps: int) -> None:
    """One of two learners: makes steps, and says how many it makes per second."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{path}/store", 2)
    device = f"{device}:{rank}" if device == "cuda" else device
    loops, _, groups = make_loops(name, device, tiny, ["group"], rank, store)
    for count in (3, steps):
        begin = time.perf_counter()
        for _ in range(count):
            loops["group"]()
        if device != "cpu":
            torch.cuda.synchronize(device)
    pathlib.Path(path, f"rate{rank}").write_text(str(steps / (time.perf_counter() - begin)))
    groups[0].close()


def measure_two(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row: steps per second on the clock of two learners, each with a batch of the size of one."""
    steps = 3 if options.tiny else 100
    with tempfile.TemporaryDirectory() as path:
        arguments = (path, name, options.device, options.tiny, steps)
        torch.multiprocessing.spawn(member, arguments, nprocs=2)
        value = float(pathlib.Path(path, "rate0").read_text())
    return {"row": f"{name}, a group of two processes", "value": value}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--agents", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--ways", nargs="*", default=["eager", "group"], choices=list(WAYS))
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2), help="2 measures groups of two")
    parser.add_argument("--tiny", action="store_true", help="small batches, for tests")
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows, written after each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cuda = torch.device(options.device).type == "cuda"
    device = torch.cuda.get_device_name(options.device) if cuda else "CPU, one thread"
    print(f"{device}, torch {torch.__version__}")
    unit = "steps/s" if cuda or options.processes == 2 else "steps/CPU-s"
    print(f"| agent, way | {unit} | torch, {unit} | ratio | |\n|---|---|---|---|---|", flush=True)
    rows: list[dict[str, Any]] = []
    for name, way in itertools.product(options.agents, options.ways if options.processes == 1 else ["group"]):
        row = measure(name, way, options) if options.processes == 1 else measure_two(name, options)
        rows.append({"unit": unit, **row})
        value, beside = row.get("value"), row.get("of_value")
        cells = [f"{each:.1f}" if each else "" for each in (value, beside)]
        cells += [f"{value / beside:.2f}" if value and beside else "", row.get("note", "")]
        print(f"| {row['row']} | {' | '.join(cells)} |", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
