"""What acting costs beside the environment and the networks: CPU time for one step of one env.

    python -m benchmarks.programs.acting [--envs 64] [--stepping vector] [--rounds 80]

An actor of PPO on CartPole-v1 makes unrolls of 64 steps and writes them to a table of this process, which is
emptied between them. The environment alone and the networks alone, with their draws of actions, are measured
in turns with it: what is left is the framework's. Each figure is the smallest of all rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import gymnasium
import numpy as np
import torch

from agents.ppo import PPO, PPOConfig
from framework import environments, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.own_settings import OwnSettings

ENVIRONMENT, UNROLL = "CartPole-v1", 64


def environment_alone(envs: int, stepping: str) -> Callable[[], None]:
    """Returns the function that makes an unroll with random actions."""
    actions = np.random.default_rng(0).integers(0, 2, (UNROLL, envs))
    if stepping == "vector":
        together = gymnasium.make_vec(
            ENVIRONMENT, num_envs=envs, vectorization_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        )
        together.reset(seed=1)

        def play_together() -> None:
            for action in actions:
                together.step(action)

        return play_together
    each = [gymnasium.make(ENVIRONMENT) for _ in range(envs)]
    for seed, environment in enumerate(each):
        environment.reset(seed=seed)

    def play_in_turns() -> None:
        for action in actions:
            for environment, mine in zip(each, action, strict=True):
                _, _, terminated, truncated, _ = environment.step(mine)
                if terminated or truncated:
                    environment.reset()

    return play_in_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--stepping", choices=("vector", "inline"), default="vector")
    parser.add_argument("--rounds", type=int, default=80)
    options = parser.parse_args()
    agent, envs = PPO(PPOConfig(unroll_length=UNROLL)), options.envs
    environment = environments.make(
        f"gymnasium:{ENVIRONMENT}", num_envs=envs, seed=1, stepping=options.stepping
    )
    spec = specs.make_environment_spec(environment)
    networks = agent.make_networks(spec)
    policy = agent.make_policy(networks)
    server = replay.Server(agent.make_tables(spec), embedded=True)
    client = server.localhost_client()
    actor = PolicyActor(policy, agent.make_adder(client, spec), num_envs=envs, seed=1)
    loop = EnvironmentLoop(environment, actor)
    observation = torch.randn(envs, 4)
    (table,) = client.server_info()

    @torch.inference_mode()
    def networks_alone() -> None:
        for _ in range(UNROLL):
            networks.act(observation, ())[0].sample(policy.random)

    parts = {
        "the loop": lambda: loop.collect(UNROLL),
        "the environment alone": environment_alone(envs, options.stepping),
        "the networks alone": networks_alone,
    }
    least = dict.fromkeys(parts, np.inf)
    with OwnSettings():  # A node of a program has set them, too.
        for _ in range(options.rounds):
            for name, part in parts.items():
                begin = time.process_time()
                part()
                least[name] = min(least[name], time.process_time() - begin)
            client.sample_batch(table, envs, timeout=10)
    for name, seconds in least.items():
        print(f"{name:22} {1e6 * seconds / UNROLL / envs:6.2f} CPU µs for one step of one env")
    rest = 2 * least["the loop"] - sum(least.values())
    print(f"{'the rest':22} {1e6 * rest / UNROLL / envs:6.2f}")


if __name__ == "__main__":
    main()
