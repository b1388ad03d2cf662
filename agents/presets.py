"""Settings that are known to work, for an agent in an environment.

``repertory train AGENT --environment NAME`` starts from them; any flag overrides its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Differences from the defaults.

    Attributes:
      agent: fields of the agent's config.
      run: fields of ``agents.commands.options.RunOptions``.
    """

    agent: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


PRESETS: dict[tuple[str, str], Preset] = {
    # 500 of 500, greedy over 100 episodes, at 50,000 steps on each of seeds 1 to 5.
    ("dqn", "gymnasium:CartPole-v1"): Preset(
        agent={
            "samples_per_insert": 24.0,
            "learning_rate_decay_steps": 9_300,  # 50,000 environment steps
        },
        run={
            "lanes_per_actor": 4,
            "max_actor_steps": 100_000,
            "target_return": 475.0,
            "evaluate_every": 2_000,
        },
    ),
    # 6.5 at 120,000 steps with twice as many learner steps (seed 101), 6.3 at 150,000 so (102).
    ("dqn", "minatar:Breakout"): Preset(
        agent={
            "n_step": 3,
            "batch_size": 32,
            "samples_per_insert": 4.0,  # A learner step for every 8 environment steps; the paper's is 32.
            "insert_burst": 64,
            "min_replay_size": 5_000,
            "learning_rate": 3e-4,
            "learning_rate_decay_steps": 125_000,  # 1,000,000 environment steps
            "learning_rate_end": 0.1,
            "target_update_rate": 0.01,
            "epsilon_decay_steps": 12_000,
            "hidden_sizes": (),  # The convolution has a layer of 128 behind it.
        },
        run={
            "num_actors": 1,
            "lanes_per_actor": 8,
            "max_actor_steps": 1_000_000,
            "evaluate_every": 50_000,
            "learner_log_every": 1_000,
        },
    ),
    # -113 to -158, 20 episodes, at 20,000 steps on seeds 1 to 5.
    ("sac", "gymnasium:Pendulum-v1"): Preset(
        agent={
            "min_replay_size": 500,
            "batch_size": 128,
            "hidden_sizes": (64, 64),
            "actor_learning_rate": 1e-3,
            "critic_learning_rate": 2e-3,
        },
        run={"num_actors": 1, "lanes_per_actor": 1, "max_actor_steps": 20_000, "evaluate_every": 5_000},
    ),
    # 5,508 and 4,737 at 60,000 steps on seeds 1 and 2.
    ("sac", "gymnasium:HalfCheetah-v5"): Preset(
        agent={"min_replay_size": 5_000, "batch_size": 128},
        run={"num_actors": 1, "lanes_per_actor": 1, "max_actor_steps": 200_000, "evaluate_every": 20_000},
    ),
    # 500 of 500, greedy over 100 episodes, at 60,000 steps on each of seeds 1 to 5.
    ("ppo", "gymnasium:CartPole-v1"): Preset(
        agent={
            "unroll_length": 64,
            "epochs": 8,
            "minibatch_size": 128,
            "learning_rate": 1e-3,
            "decay_steps": 60_000,
        },
        run={
            "num_actors": 1,
            "lanes_per_actor": 8,
            "max_actor_steps": 60_000,
            "target_return": 475.0,
            "evaluate_every": 10_000,
            "num_evaluation_episodes": 100,
            "learner_log_every": 10,
        },
    ),
    ("ppo", "gymnasium:Acrobot-v1"): Preset(
        agent={
            "unroll_length": 64,
            "epochs": 6,
            "minibatch_size": 128,
            "learning_rate": 1e-3,
            "decay_steps": 200_000,
            "normalize_observations": True,
            "normalize_rewards": True,
            "entropy_coefficient": 0.01,
        },
        run={
            "num_actors": 1,
            "lanes_per_actor": 16,
            "max_actor_steps": 200_000,
            "evaluate_every": 20_000,
            "num_evaluation_episodes": 100,
            "learner_log_every": 10,
        },
    ),
    # -170 and -155, greedy over 50 episodes, on seeds 1 and 2. With discount 0.9 some episodes hang for ever.
    ("ppo", "gymnasium:Pendulum-v1"): Preset(
        agent={
            "unroll_length": 64,
            "epochs": 10,
            "minibatch_size": 256,
            "learning_rate": 1e-3,
            "decay_steps": 200_000,
            "discount": 0.97,
            "target_kl": 0.02,
            "normalize_observations": True,
            "normalize_rewards": True,
        },
        run={
            "num_actors": 1,
            "lanes_per_actor": 16,
            "max_actor_steps": 200_000,
            "evaluate_every": 20_000,
            "learner_log_every": 10,
        },
    ),
    ("ppo", "gymnasium:LunarLander-v3"): Preset(
        agent={
            "unroll_length": 128,
            "epochs": 6,
            "minibatch_size": 256,
            "learning_rate": 1e-3,
            "decay_steps": 1_000_000,
            "discount": 0.995,
            "gae_lambda": 0.97,
            "normalize_observations": True,
            "normalize_rewards": True,
            "entropy_coefficient": 0.01,
        },
        run={
            "num_actors": 1,
            "lanes_per_actor": 16,
            "max_actor_steps": 1_000_000,
            "target_return": 240.0,
            "evaluate_every": 50_000,
            "learner_log_every": 10,
        },
    ),
    ("ppo", "testing:Memory"): Preset(
        agent={
            "unroll_length": 20,
            "epochs": 4,
            "minibatch_size": 160,
            "learning_rate": 1e-3,
            "decay_steps": 200_000,
            "recurrent": "lstm",
            "entropy_coefficient": 0.01,
        },
        run={
            "num_actors": 1,
            "lanes_per_actor": 32,
            "max_actor_steps": 200_000,
            "target_return": 0.99,
            "evaluate_every": 20_000,
            "num_evaluation_episodes": 100,
            "learner_log_every": 10,
        },
    ),
    # 500 of 500, greedy over 100 episodes, at 150,000 steps on each of seeds 1 to 5.
    ("impala", "gymnasium:CartPole-v1"): Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 4e-3,
            "learning_rate_decay_steps": 1_170,  # 150,000 environment steps
            "unroll_length": 16,
            "batch_size": 8,
            "vtrace_lambda": 0.95,
            "value_cost": 0.1,  # Returns go up to 100: their gradient would drown the policy's.
        },
        run={
            "lanes_per_actor": 8,
            "max_actor_steps": 150_000,
            "evaluate_every": 25_000,
            "publish_every": 1,
            "learner_log_every": 50,
        },
    ),
    # 1.0 at 200,000 steps on each of seeds 1 to 5. Only the last of ten actions is rewarded: a small discount
    # and lambda keep its luck out of the updates of the others.
    ("impala", "testing:Memory"): Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 5e-3,
            "discount": 0.9,
            "vtrace_lambda": 0.9,
            "hidden_sizes": (32,),
            "lstm_size": 32,  # None, a network without memory, stays at chance, 0.5.
        },
        run={
            "lanes_per_actor": 8,
            "max_actor_steps": 200_000,
            "target_return": 0.99,
            "evaluate_every": 25_000,
            "num_evaluation_episodes": 100,
            "publish_every": 1,
            "learner_log_every": 50,
        },
    ),
    # 13.85, greedy over 20 episodes, at 2,000,000 steps on seed 201, on which it was chosen.
    ("impala", "minatar:Breakout"): Preset(
        agent={
            "optimizer": "adam",
            "learning_rate": 2e-3,
            "learning_rate_decay_steps": 6_250,  # 2,000,000 environment steps
            "learning_rate_end": 0.05,
            "vtrace_lambda": 0.95,
            "value_cost": 0.25,
            "entropy_cost": 0.02,
        },
        run={
            "lanes_per_actor": 16,
            "max_actor_steps": 2_000_000,
            "evaluate_every": 100_000,
            "publish_every": 1,
            "learner_log_every": 50,
        },
    ),
    # The paper sums its loss over a batch: epsilon and norm are its 0.01 and 40, divided by 320 steps.
    ("impala", "atari:Pong"): Preset(
        agent={
            "learning_rate": 4.8e-4,
            "learning_rate_decay_steps": 31_250,  # 10,000,000 environment steps
            "optimizer_epsilon": 3e-5,
            "max_gradient_norm": 0.125,
            "torso": "nature",
            "unroll_length": 40,
            "batch_size": 8,
            "reward_clip": 1.0,
            "previous_action_and_reward": True,
        },
        run={
            "lanes_per_actor": 8,
            "max_actor_steps": 10_000_000,
            "evaluate_every": 500_000,
            "num_evaluation_episodes": 8,
            "publish_every": 1,
            "learner_log_every": 50,
        },
    ),
    ("random_actions", "gymnasium:CartPole-v1"): Preset(run={"max_actor_steps": 10_000}),
}


def find(agent: str, environment: str) -> Preset:
    """The preset of this pair; an empty one if there is none."""
    return PRESETS.get((agent, environment), Preset())
