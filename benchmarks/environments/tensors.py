"""CartPole as tensors, beside gymnasium's: the environment alone, and PPO on it.

    python -m benchmarks.environments.tensors [--envs 4096] [--rounds 5] [--device cpu]

Rows take turns, and each figure is the median of the rounds: env steps per CPU-second of this process, torch
on one thread. The environment alone gets random actions. PPO learns from batches of 32 steps of each env, in
2 epochs of minibatches of 4,096, with two hidden layers of 64; its rows are whole runs of six batches after
one that is not counted. On a GPU the seconds are those on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch.nn import functional

import launch
from agents.ppo import PPO, PPOConfig
from framework import environments
from framework.programs import RunConfig, make_program

UNROLL, EPOCHS, MINIBATCH, HIDDEN, BATCHES = 32, 2, 4096, (64, 64), 6
Turn = Callable[[], int]  # Returns the number of env steps that it made.


def alone(num_envs: int, device: str) -> dict[str, Turn]:
    """A hundred steps of each environment; ten of the slowest."""
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 2, (16, num_envs))
    ours = environments.make("tensor:CartPole-v1", num_envs=num_envs, seed=1, options={"device": device})
    theirs = {
        mode: gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode=mode)
        for mode in ("vector_entry_point", "sync")
    }
    ours.reset()
    for each in theirs.values():
        each.reset(seed=1)

    def turn(step: Callable[[Any], Any], given: Any, count: int) -> Turn:
        def run() -> int:
            for i in range(count):
                step(given[i % 16])
            return count * num_envs

        return run

    return {
        "tensor:CartPole-v1": turn(ours.step, torch.from_numpy(actions).to(device), 100),
        "gymnasium's vectorized one": turn(theirs["vector_entry_point"].step, actions, 100),
        "gymnasium's SyncVectorEnv": turn(theirs["sync"].step, actions, 2),
    }


def learning(num_envs: int, device: str) -> dict[str, Turn]:
    """Whole runs of PPO, and the same by hand."""
    config = PPOConfig(
        unroll_length=UNROLL, epochs=EPOCHS, minibatch_size=MINIBATCH, hidden_sizes=HIDDEN, device=device
    )

    def program(name: str, stepping: str, options: dict[str, Any]) -> Turn:
        def run() -> int:
            settings = RunConfig(
                envs_per_actor=num_envs,
                max_env_steps=BATCHES * UNROLL * num_envs,
                evaluate_period=None,
                stepping=stepping,
                environment_options=options,
                log_period=10**9,
            )
            return int(launch.launch(make_program(PPO(config), name, settings), engine="serial")["env_steps"])

        return run

    return {
        "PPO on tensor:CartPole-v1": program("tensor:CartPole-v1", "auto", {"device": device}),
        "PPO on gymnasium's vectorized one": program("gymnasium:CartPole-v1", "vector", {}),
        "a loop by hand on tensor:CartPole-v1": lambda: by_hand(num_envs, device),
    }


def by_hand(num_envs: int, device: str) -> int:
    """PPO as one loop of tensors."""

    def network(outputs: int) -> torch.nn.Sequential:
        layers, width = [], 4
        for size in HIDDEN:
            layers += [torch.nn.Linear(width, size), torch.nn.Tanh()]
            width = size
        return torch.nn.Sequential(*layers, torch.nn.Linear(width, outputs)).to(device)

    policy, value = network(2), network(1)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5, fused=True)
    environment = environments.make(
        "tensor:CartPole-v1", num_envs=num_envs, seed=1, options={"device": device}
    )
    now = environment.reset()
    for _ in range(BATCHES):
        rows = []
        for _ in range(UNROLL):
            with torch.no_grad():
                logits = policy(now.observation)
            noise = torch.empty_like(logits).exponential_()
            action = (logits.softmax(-1) / noise).argmax(-1)
            then = environment.step(action)
            rows.append((now.observation, action, logits, then.reward, then.discount, then.step_type))
            now = then
        observations, actions, logits, rewards, discounts, kinds = map(torch.stack, zip(*rows, strict=True))
        with torch.no_grad():
            values = value(torch.cat([observations, now.observation[None]])).squeeze(-1)
        advantages, last = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
        for t in reversed(range(UNROLL)):
            error = rewards[t] + 0.99 * discounts[t] * values[t + 1] - values[t]
            last = error + 0.99 * 0.95 * discounts[t] * (kinds[t] == 1) * last
            advantages[t] = last = last * (kinds[t] != 0)
        real = (kinds != 0).flatten()  # The others begin an episode.
        targets = advantages + values[:-1]
        data = [leaf.flatten(0, 1)[real] for leaf in (observations, actions, logits, advantages, targets)]
        data[3] = (data[3] - data[3].mean()) / (data[3].std() + 1e-8)
        data[2] = data[2].log_softmax(-1).gather(1, data[1][:, None]).squeeze(1)
        for _ in range(EPOCHS):
            order = torch.randperm(len(data[0]), device=data[0].device)
            for part in minibatches(data, order):
                observation, taken, old, advantage, target = part
                log_probs = functional.log_softmax(policy(observation), -1).gather(1, taken[:, None])
                ratio = (log_probs.squeeze(1) - old).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                error = value(observation).squeeze(-1) - target
                loss = 0.25 * (error**2).mean() - gain.mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
    return BATCHES * UNROLL * num_envs


def minibatches(data: list[torch.Tensor], order: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(leaf[order].split(MINIBATCH) for leaf in data), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--envs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    for turns in (alone(options.envs, options.device), learning(options.envs, options.device)):
        rates: dict[str, list[float]] = {name: [] for name in turns}
        for round_ in range(options.rounds + 1):
            for name, turn in turns.items():
                start = clock()
                rate = turn() / (clock() - start)
                if round_:  # The first one warms up.
                    rates[name].append(rate)
        first, *_ = rates.values()
        print(f"\n{'env steps per second':40}{'median':>14}{'first / it':>12}")
        for name, each in rates.items():
            ratio = statistics.median(a / b for a, b in zip(first, each, strict=True))
            print(f"{name:40}{statistics.median(each):14,.0f}{ratio:12.2f}", flush=True)


if __name__ == "__main__":
    main()
