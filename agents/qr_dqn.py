"""QR-DQN: Q-learning of quantiles of the return (Dabney et al., 2018).

The network gives K quantiles of the return of each action, at the fractions (k + 1/2) / K. The loss is
quantile regression with the Huber loss, whose threshold kappa is `huber_delta`. Everything else is as in DQN:
double Q-learning, n-step targets, prioritized replay, dueling and noisy networks are fields of the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from agents import dqn
from agents.dqn import DQN, DQNConfig, DQNNetworks, ItemLosses
from framework import config_checks as check
from framework import losses
from framework.learners import LossContext
from framework.networks import mask_values
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.types import Transition


@dataclass(frozen=True)
class QRDQNConfig(DQNConfig):
    """Settings of QR-DQN, in addition to `DQNConfig`'s."""

    huber_delta: float = 1.0  # The paper's kappa: errors of quantiles beyond this count linearly.
    num_quantiles: int = 50  # K, the quantiles of each action. More: a finer distribution, slower.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 2, "num_quantiles")


class QuantileNetworks(DQNNetworks):
    """The networks of DQN, with quantiles `[N, A, K]` of the return of each action."""

    def expected(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.mean(-1)


class QRDQNNetworks(QuantileNetworks):
    """Quantiles at `num_quantiles` fixed fractions."""

    def __init__(self, config: QRDQNConfig, spec: EnvironmentSpec):
        super().__init__(config, spec, config.num_quantiles)


class QuantileDQN(DQN):
    """What QR-DQN and IQN share: the loss of quantiles at given fractions."""

    members = (*DQN.members, "expected")

    def target_samples(
        self, networks: DQNNetworks, target: nn.Module, data: Transition, *fractions: torch.Tensor
    ) -> torch.Tensor:
        """Samples `[N, K]` of the targets of N `Transition`s, for networks that give samples of the return.

        Args:
          networks: the networks that learn.
          target: the target network: observation and `fractions` to `[N, A, K]`.
          data: the transitions.
          fractions: at most one `[N, K]`, for networks of quantiles that take fractions.
        """
        config, (rewards, discounts) = self.config, self.rewards(data)
        following = data.next_observation
        with torch.no_grad():
            samples = target(following, *fractions)
            if config.double and not config.munchausen:
                next_values = networks.values(following)
            else:
                next_values = networks.expected(target(following) if fractions else samples)
            next_values = mask_values(next_values, following)
            if config.munchausen:
                values = mask_values(networks.expected(target(data.observation)), data.observation)
                bonus = losses.munchausen_rewards(values, data.action, *config.munchausen_settings)
                rewards = rewards + bonus
                samples = losses.munchausen_next_values(next_values, config.munchausen_temperature, samples)
            else:
                samples = losses.of_actions(samples, next_values.argmax(-1))
            return rewards.unsqueeze(1) + losses.discounted(discounts.unsqueeze(1), samples)

    def quantile_losses(
        self, outputs: torch.Tensor, data: Transition, fractions: torch.Tensor, targets: torch.Tensor
    ) -> ItemLosses:
        """What `item_losses` returns. Priorities are the losses.

        Args:
          outputs: `[N, A, K]` quantiles of the network that learns.
          data: the transitions.
          fractions: `[N, K]` of the quantiles.
          targets: `[N, K']` samples of the targets.
        """
        quantiles = losses.of_actions(outputs, data.action)
        each = losses.quantile_huber(quantiles, fractions, targets, self.config.huber_delta)
        known, outputs = quantiles.detach(), outputs.detach()
        metrics = {
            "q_mean": outputs.mean(),
            "td_error": (targets.mean(1) - known.mean(1)).abs().mean(),
            "spread": known.std(1, correction=0).mean(),
        }
        return each, each.detach(), metrics


class QRDQN(QuantileDQN):
    """Distributional Q-learning with quantiles, for one discrete action per env."""

    config: QRDQNConfig = QRDQNConfig()
    networks_class = QRDQNNetworks

    def item_losses(
        self, networks: DQNNetworks, target: nn.Module, data: Transition, context: LossContext | None = None
    ) -> ItemLosses:
        """As `DQN.item_losses`. Priorities are the losses."""
        outputs = networks.q_network(data.observation)
        items, count = outputs.shape[0], outputs.shape[2]
        fractions = (torch.arange(count, device=outputs.device) + 0.5) / count
        targets = self.target_samples(networks, target, data)
        return self.quantile_losses(outputs, data, fractions.expand(items, -1), targets)


PRESETS: Mapping[str, Preset] = {
    # One stream leaves 1 of 6 seeds at 346; of seeds 101 to 106, two streams reach 489 to 500.
    "gymnasium:CartPole-v1": Preset({**dqn.CARTPOLE, "num_quantiles": 20, "dueling": True}, dqn.CARTPOLE_RUN),
    **dict.fromkeys(
        ("minatar:Breakout", "minatar:*"),
        Preset({**dqn.MINATAR, "num_quantiles": 20}, dqn.MINATAR_RUN, sources=dqn.YOUNG),
    ),
    "atari:*": Preset(
        {**dqn.ATARI_2017, "learning_rate": 5e-5, "num_quantiles": 200},
        dqn.ATARI_2017_RUN,
        "Dabney et al. (2018), section 5",
        dqn.OURS,
    ),
}
