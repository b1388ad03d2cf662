"""An agent in somebody else's loop: DQN learns CartPole-v1 without a program.

    python examples/own_loop.py

The application makes and steps the environment, and calls a session of the agent (about a minute).
"""

from __future__ import annotations

import gymnasium
import numpy as np

from agents.dqn import DQN, DQNConfig
from framework import environments, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.programs import Session


def train(agent: DQN, num_steps: int = 50_000, seed: int = 1) -> Session:
    env = gymnasium.make("CartPole-v1")
    session = agent.session(specs.from_spaces(env.observation_space, env.action_space), seed=seed)
    observation, _ = env.reset(seed=seed)
    for _ in range(num_steps):
        action = session.act(observation[None])[0]
        observation, reward, terminated, truncated, _ = env.step(action)
        session.observe(observation[None], [reward], terminated, truncated)
        session.learn()
        if terminated or truncated:
            observation, _ = env.reset()
    return session


def greedy_return(agent: DQN, session: Session, num_episodes: int = 20) -> float:
    """Mean return of the greedy policy, with the parameters that the session has now."""
    seeded = [environments.SeededEpisodes]
    environment = environments.make("gymnasium:CartPole-v1", num_envs=num_episodes, wrappers=seeded)
    actor = PolicyActor(agent.make_policy(session.networks, evaluation=True), num_envs=num_episodes)
    return float(np.mean(EnvironmentLoop(environment, actor).run_episodes(num_episodes)["episode_return"]))


def main(num_steps: int = 50_000, seed: int = 1) -> float:
    agent = DQN(DQNConfig(samples_per_insert=24.0, learning_rate_decay=50_000, epsilon_decay=12_000))
    return greedy_return(agent, train(agent, num_steps, seed))


if __name__ == "__main__":
    print(f"greedy return: {main():.1f}")
