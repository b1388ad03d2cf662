"""Seconds of learner steps in one thread of Python, with one and two torch threads, by the networks' size.

python -m benchmarks.learner.threads [--seconds 0.2]

The figures decide from which size on the learner of a program on `serial` uses a second thread; see
`learner_threads` of `RunConfig`. PPO learns from 4 minibatches of 256 rows, DQN in 10 steps from batches of
128, both with two hidden layers. One and two threads take turns. The best of three turns counts, since other
programs only slow it.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["OMP_NUM_THREADS"] = "2"  # Before torch makes its threads.

import numpy as np
import torch
from dm_env import specs as dm_specs

from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from framework import core, specs
from framework.session import Session

SPEC = specs.EnvironmentSpec(
    observations=dm_specs.Array((8,), np.float32),
    actions=dm_specs.DiscreteArray(4),
    rewards=dm_specs.Array((), np.float32),
    discounts=dm_specs.BoundedArray((), np.float32, 0.0, 1.0),
)
WIDTHS = (90, 300, 540, 700, 1000, 1400, 2200)
ENVS, UNROLL = 16, 16


def make(name: str, width: int) -> core.Agent:
    if name == "PPO":
        sizes = {"hidden_sizes": (width, width), "shared": True}
        return PPO(PPOConfig(unroll_length=UNROLL, epochs=4, minibatch_size=ENVS * UNROLL, **sizes))
    return DQN(DQNConfig(hidden_sizes=(width, width), min_replay_size=256, insert_burst=100_000))


def turn(session: Session, seconds: float) -> float:
    """Mean seconds of `learn`, of at least two calls."""
    random, spent, calls = np.random.default_rng(0), 0.0, 0
    while calls < 2 or spent < seconds:
        for _ in range(UNROLL):
            session.act(random.normal(size=(ENVS, 8)).astype(np.float32))
            session.observe(random.normal(size=(ENVS, 8)).astype(np.float32), random.normal(size=ENVS), False)
        start = time.perf_counter()
        if session.learn(max_steps=10):
            spent, calls = spent + time.perf_counter() - start, calls + 1
    return spent / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a turn")
    seconds = parser.parse_args().seconds
    print("| agent | parameters | 1 thread, ms | 2 threads, ms | faster by |\n|---|---|---|---|---|")
    for name in ("PPO", "DQN"):
        for width in WIDTHS:
            session = make(name, width).session(SPEC, num_envs=ENVS)
            best = {1: np.inf, 2: np.inf}
            turn(session, 0.0)  # Compiles what is compiled.
            for _ in range(3):
                for threads in best:
                    torch.set_num_threads(threads)
                    best[threads] = min(best[threads], turn(session, seconds))
            parameters = sum(tensor.numel() for tensor in session.networks.parameters())
            print(
                f"| {name} | {parameters:,} | {1e3 * best[1]:.1f} | {1e3 * best[2]:.1f} | "
                f"{best[1] / best[2]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
