"""Population-based training of PPO on CartPole-v1, with learning rates that begin between 1e-6 and 1e-1.

    python examples/population.py [ENGINE] [COPIES] [SEED] [DIRECTORY]

Without copies (0), the members train alone. The same call with a directory goes on from its last round.
"""

from __future__ import annotations

import sys
from typing import Any

import launch
from agents.ppo import PPO, PPOConfig
from framework.experiments.population import make_population
from framework.programs import RunConfig

SEARCH = {"learning_rate": (1e-6, 1e-1)}


def main(
    engine: str = "processes",
    copies: int = 2,
    seed: int = 1,
    directory: str | None = None,
    env_steps: int = 40_000,
    members: int = 8,
    rounds: int = 10,
) -> list[dict[str, Any]]:
    agent = PPO(
        PPOConfig(
            hidden_sizes=(32, 32),
            unroll_length=64,
            epochs=4,
            minibatch_size=128,
            normalize_rewards=True,
            learning_rate_decay=env_steps,
            clip_end=0.1,
        )
    )
    config = RunConfig(
        envs_per_actor=8,
        max_env_steps=env_steps,
        evaluate_period=env_steps // rounds,
        num_evaluation_episodes=20,
        directory=directory,
        seed=seed,
    )
    program = make_population(agent, "gymnasium:CartPole-v1", SEARCH, config, members=members, copies=copies)
    return launch.launch(program, engine)


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    arguments[1:3] = map(int, arguments[1:3])
    for index, member in enumerate(main(*arguments)):
        print(f"member {index}: return {member['score']:.1f} with {member['settings']}")
