"""A2C: synchronous advantage actor-critic (Mnih et al., 2016), as a plan.

All workers collect with the same parameters, and the learner makes one step on all of their unrolls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agents.ppo import PPOConfig, PPONetworks, PPOPolicy
from framework import config_checks as check
from framework import losses
from framework.flow import Flow, Node, Par
from framework.learners import LossContext, LossOutput, rmsprop
from framework.programs import PlanLearner, Preset, RolloutWorker, concatenate
from framework.replay import ReplaySample
from framework.runs.presets import ATARI_2015_RUN
from framework.specs import EnvironmentSpec
from framework.torch_agents import ActorCriticConfig, OnPolicyAgent


@dataclass(frozen=True)
class A2CConfig(ActorCriticConfig):
    """Settings of A2C and A3C, in addition to `ActorCriticConfig`'s."""

    unroll_length: int = 16  # Steps of an env in an unroll. More: less bias, and fewer learner steps.
    normalize_advantages: bool = False  # Scales advantages to mean 0 and variance 1 over a batch.
    optimizer: str = "adam"  # "rmsprop" or "adam".
    rmsprop_decay: float = 0.99  # Decay of RMSprop's mean of squared gradients. Higher remembers longer.
    rmsprop_momentum: float = 0.0  # Share of the last update that is added to the next.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "rmsprop_momentum")
        check.fraction(self, "rmsprop_decay")
        check.one_of(self, ("rmsprop", "adam"), "optimizer")


class A2C(OnPolicyAgent):
    """Synchronous advantage actor-critic, for discrete and continuous actions."""

    config: A2CConfig = A2CConfig()
    memory_field = "recurrent"
    takes_action_masks = True

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        return Par(workers, RolloutWorker.sample).sync().map(concatenate).map(learner.step)

    def make_networks(self, spec: EnvironmentSpec) -> PPONetworks:
        """The networks of PPO, unless there is a `networks_fn`."""
        config = PPOConfig(**self.config.network_settings())
        members = ("actions", "normalizer", "initial_state", "act", "forward")
        return self.custom_networks(spec, lambda _, spec: PPONetworks(config, spec), members)

    def make_policy(self, networks: PPONetworks, evaluation: bool = False) -> PPOPolicy:
        return PPOPolicy(networks, evaluation)

    def make_optimizer(self, networks: PPONetworks) -> torch.optim.Optimizer:
        is_adam = self.config.optimizer == "adam"
        return super().make_optimizer(networks) if is_adam else rmsprop(networks, self.config)

    def loss(self, networks: PPONetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The loss of unrolls `[N, T + 1, ...]`, whose last row is for bootstrapping."""
        config, data = self.config, batch.data
        mask = losses.transition_mask(data.mask)
        starts = data.start_of_episode.float().clone()
        starts[:, 0] = 0.0  # The first row's state is stored, whether an episode begins there or not.
        policy, values = networks(data.observation, data.extras.get("state", ()), starts)
        with torch.no_grad():
            discounts = config.discount * data.discount.float()
            advantages = losses.generalized_advantages(
                self.rewards(data), discounts, values, mask, config.gae_lambda
            )
            targets = values + advantages
            if config.normalize_advantages:
                advantages = losses.normalize_advantages(advantages, mask)
        log_probs = policy.log_prob(networks.actions.drawn(data))
        policy_loss = losses.policy_gradient_loss(log_probs, advantages, mask)
        value_loss = losses.value_loss(values, targets, mask)
        entropy = losses.masked_mean(policy.entropy(), mask)
        loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return LossOutput(loss, metrics, weight=mask.sum())


_RUN = {"num_actors": 2, "learner_log_period": 100}

PRESETS: Mapping[str, Preset] = {
    # 496.4 to 500 of 500, greedy over 100 episodes, at 150,000 steps on seeds 1 to 5. Many small steps: with
    # unrolls of 16 and GAE, returns fall again from 500.
    "gymnasium:CartPole-v1": Preset(
        agent={
            "unroll_length": 5,
            "gae_lambda": 1.0,
            "learning_rate_decay": 150_000,
            "entropy_coefficient": 0.0,
        },
        run={**_RUN, "envs_per_actor": 4, "max_env_steps": 150_000, "evaluate_period": 25_000},
    ),
    "gymnasium:Acrobot-v1": Preset(
        agent={
            "value_coefficient": 0.1,  # Larger, the gradient of the values would drown the policy's.
            "learning_rate": 4e-3,
            "learning_rate_decay": 200_000,
            "entropy_coefficient": 0.04,  # With less, some runs never reach the first goal.
            "max_gradient_norm": 5.0,
        },
        run={**_RUN, "envs_per_actor": 8, "max_env_steps": 200_000, "evaluate_period": 50_000},
    ),
    # The error of the values is the square, of which ours is the half; RMSprop's epsilon is in the root.
    "atari:*": Preset(
        agent={
            "reward_clip": 1.0,
            "unroll_length": 5,
            "gae_lambda": 1.0,
            "optimizer": "rmsprop",
            "learning_rate": 7e-4,
            "adam_epsilon": 1e-5**0.5,
            "learning_rate_decay": 80_000_000,
            "value_coefficient": 1.0,
            "hidden_sizes": (),  # The convolutions have a layer of 512 after them.
            "shared": True,
        },
        run={**ATARI_2015_RUN, **_RUN, "envs_per_actor": 8, "max_env_steps": 80_000_000},
        source="Dhariwal et al. (2017), a2c of OpenAI Baselines",
        sources={"Dhariwal et al. (2017), a2c of OpenAI Baselines": "num_actors envs_per_actor"},
    ),
}
