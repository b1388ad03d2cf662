"""TD3+BC (Fujimoto and Gu, 2021): TD3 from data, near the data's actions.

It adds one term to the policy's loss: the squared error to the actions of the data, against values that are
scaled to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agents.td3 import PENDULUM, PENDULUM_RUN, TD3, TD3Config, TD3Networks
from framework import config_checks as check
from framework.learners import LossContext, LossOutput
from framework.networks import frozen
from framework.replay import ReplaySample
from framework.runs.presets import Preset


@dataclass(frozen=True)
class TD3BCConfig(TD3Config):
    """Settings of TD3+BC: TD3's, and the weight of the values."""

    learning_rate: float = 3e-4  # Initial learning rate of the policy (Adam).
    critic_learning_rate: float = 3e-4  # Initial learning rate of the critics (Adam).
    value_weight: float = 2.5  # Weight of the values, which are scaled to 1, against the squared error.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "value_weight")
        if self.prioritized:
            check.refuse(self, "prioritized", ", expected False: all of the data counts alike.")


class TD3BC(TD3):
    """TD3 whose policy also clones the actions of the data.

    ```python
    config = programs.RunConfig(dataset="data/halfcheetah-medium", max_learner_steps=200_000)
    program = programs.make_program(TD3BC(), "gymnasium:HalfCheetah-v5", config)
    ```
    """

    config: TD3BCConfig = TD3BCConfig()

    def loss(self, networks: TD3Networks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """TD3's losses, with `mean((a - pi(s))^2) - w Q(s, pi(s)) / mean |Q|` of the policy (equation 5)."""
        config, data = self.config, batch.data
        next_actions = self.next_actions(data.next_observation, context)
        each, _, metrics = self.critic_losses(networks, context.targets["critics"], data, next_actions)
        critic = metrics["critic_loss"] = each.mean()
        if not context.is_due(config.actor_delay):
            return LossOutput(critic, metrics)
        actions = networks.policy(data.observation)
        with frozen(networks.critics):
            values = networks.values(data.observation, actions)
        error = metrics["clone_error"] = (actions - networks.actions.drawn(data)).square().mean()
        actor = error - config.value_weight * values.mean() / values.detach().abs().mean().clamp(min=1e-6)
        metrics["actor_loss"] = actor
        return LossOutput(critic + actor, metrics)


PRESETS: Mapping[str, Preset] = {
    # -144.9, greedy over 100 episodes, the best of 20,000 learner steps on data of -585.9, seed 1.
    # With a `value_weight` of 2.5, it was -281.3.
    "gymnasium:Pendulum-v1": Preset({**PENDULUM, "learning_rate": 1e-3, "value_weight": 10.0}, PENDULUM_RUN),
}
