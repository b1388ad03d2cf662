"""Learner steps per second of programs on `serial`, with one and two torch threads, by the networks' size.

python benchmarks/learner_threads.py [--seconds 2]

The numbers decide from which size on a serial program uses all cores; see `learner_threads` of `RunConfig`.
One and two threads take turns. Acting is part of the figures. PPO learns from minibatches of 256, DQN from 128.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["OMP_NUM_THREADS"] = "2"  # Before torch makes its threads.

import launch
from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from framework import core
from framework.programs import RunConfig, make_program

WIDTHS = (90, 300, 540, 700, 1000, 1400, 2200)  # Of two hidden layers.


def make(name: str, width: int) -> core.Agent:
    if name == "PPO":
        sizes = {"hidden_sizes": (width, width), "shared": True}
        return PPO(PPOConfig(unroll_length=256, epochs=4, minibatch_size=256, **sizes))
    return DQN(DQNConfig(hidden_sizes=(width, width), min_replay_size=200, samples_per_insert=64.0))


def num_parameters(agent: core.Agent) -> int:
    from framework.programs.make import environment_spec

    spec = environment_spec(agent, "gymnasium:CartPole-v1", RunConfig())
    networks = agent.make_networks(spec)
    return sum(parameter.numel() for parameter in networks.parameters())


def steps_per_second(agent: core.Agent, threads: int, seconds: float) -> tuple[float, float]:
    """Env steps, which learning keeps pace with, per second and per CPU second."""
    config = RunConfig(envs_per_actor=4, evaluate_period=None, learner_threads=threads, log_period=10**9)
    with launch.start(make_program(agent, "gymnasium:CartPole-v1", config), engine="serial") as job:

        def run(until: float) -> int:
            while time.perf_counter() < until:
                try:
                    job.wait(timeout=0.05)
                except TimeoutError:
                    pass
            return int(job.client("counter").get_counts()["env_steps"])

        before = run(time.perf_counter() + 0.5 * seconds)
        start, cpu = time.perf_counter(), time.process_time()
        made = run(start + seconds) - before
        return made / (time.perf_counter() - start), made / (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each of three turns of a case")
    seconds = parser.parse_args().seconds / 3
    print("| agent | parameters | 1 thread | 2 threads | ratio | ratio per CPU second |")
    print("|---|---|---|---|---|---|")
    for name in ("PPO", "DQN"):
        for width in WIDTHS:
            agent = make(name, width)
            turns = [[steps_per_second(agent, threads, seconds) for threads in (1, 2)] for _ in range(3)]
            one, two = (max(turn[i] for turn in turns) for i in (0, 1))
            print(
                f"| {name} | {num_parameters(agent):,} | {one[0]:,.0f} | {two[0]:,.0f} | "
                f"{two[0] / one[0]:.2f} | {two[1] / one[1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
