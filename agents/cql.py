"""CQL: conservative Q-learning (Kumar et al., 2020), CQL(H) on SAC, for continuous and discrete actions.

SAC's losses on data, and a penalty on the critics' values of actions that the data does not have, so that the
policy does not follow values that nothing has corrected. The penalty has a soft maximum over all actions. It
is exact for one discrete action, and otherwise estimated from uniform actions and the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from agents.sac import SAC, SACConfig, SACNetworks
from agents.td3 import PENDULUM, PENDULUM_RUN
from framework import config_checks as check
from framework import losses
from framework.learners import LossContext, LossOutput
from framework.networks import SquashedGaussian, mask_values
from framework.replay import ReplaySample
from framework.runs.presets import Preset
from framework.types import Nest, Transition


@dataclass(frozen=True)
class CQLConfig(SACConfig):
    """Settings of CQL: SAC's, with the paper's defaults for MuJoCo, and those of the penalty."""

    learning_rate: float = 1e-4  # Initial learning rate of the policy (Adam).
    critic_learning_rate: float = 3e-4  # Initial learning rate of the critics (Adam).
    conservative_weight: float = 5.0  # Weight of the penalty. More: nearer to the data's actions.
    # Continuous actions of each kind for the penalty: uniform, the policy's, and the policy's one step later.
    num_samples: int = 10
    hidden_sizes: tuple[int, ...] = (256, 256, 256)  # Hidden layers of the policy and of each critic.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "num_samples")
        check.at_least(self, 0, "conservative_weight")


class CQL(SAC):
    """Conservative Q-learning.

    ```python
    config = programs.RunConfig(dataset="data/hopper-medium-replay", max_learner_steps=200_000)
    program = programs.make_program(CQL(), "gymnasium:Hopper-v5", config)
    ```
    """

    config: CQLConfig = CQLConfig()

    def loss(self, networks: SACNetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """SAC's losses, and `conservative_weight` times the penalty, summed over the critics (equation 4)."""
        output = super().loss(networks, batch, context)
        penalties = self.penalties(networks, batch.data, context)
        penalty = penalties.sum(0).mean()
        metrics = {**output.metrics, "conservative_penalty": penalties.mean()}
        return output._replace(loss=output.loss + self.config.conservative_weight * penalty, metrics=metrics)

    def penalties(self, networks: SACNetworks, data: Transition, context: LossContext) -> torch.Tensor:
        """By how much each critic's soft maximum exceeds its value of the data's action, `[C, N]`."""
        taken, observation = networks.actions.drawn(data), data.observation
        if not networks.actions.continuous:
            values = mask_values(networks.critics(observation), observation)
            return losses.conservative_penalty(values, taken.expand(len(values), -1))
        with torch.no_grad():
            drawn = [self._drawn(networks, each, context) for each in (observation, data.next_observation)]
            actions, log_densities = (list(each) for each in zip(*drawn, strict=True))
            # A uniform action between -1 and 1 in each of D dimensions has the density 2^-D.
            actions.append(2.0 * context.uniform_like(actions[0]) - 1.0)
            size = actions[0].shape[-1]
            log_densities.append(torch.full_like(log_densities[0], -size * math.log(2.0)))
        values = networks.critics(observation, torch.cat(actions, 1))
        known = networks.critics(observation, taken)
        return losses.sampled_conservative_penalty(values, torch.cat(log_densities, 1), known)

    def _drawn(
        self, networks: SACNetworks, observation: Nest, context: LossContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions `[N, S, D]` of the policy, and their log densities `[N, S]`."""
        base = networks.policy(observation).base
        mean = base.mean.unsqueeze(1).expand(-1, self.config.num_samples, -1)
        policy = SquashedGaussian(mean, base.log_std.unsqueeze(1))
        return policy.rsample_with_log_prob(noise=context.normal_like(mean))


PRESETS: Mapping[str, Preset] = {
    # 500, greedy over 100 episodes, at 20,000 learner steps on data of 231.6, seed 1.
    "gymnasium:CartPole-v1": Preset(
        {
            "batch_size": 128,
            "hidden_sizes": (64, 64),
            "learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
        }
    ),
    # -149.9, greedy over 100 episodes, the best of 20,000 learner steps on data of -585.9, seed 1.
    "gymnasium:Pendulum-v1": Preset({**PENDULUM, "learning_rate": 1e-3}, PENDULUM_RUN),
}
