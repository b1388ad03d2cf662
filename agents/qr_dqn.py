"""QR-DQN: Q-learning of quantiles of the return (Dabney et al., 2018).

The network gives K quantiles of the return of each action, at the fractions (k + 1/2) / K. The loss is
quantile regression with Huber's loss, whose threshold kappa is `huber_delta`. All else is DQN's: double
Q-learning, n-step targets, prioritized replay, dueling and noisy networks are fields of the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from agents.dqn import DQN, MINATAR, MINATAR_RUN, DQNConfig, DQNNetworks
from framework import config_checks as check
from framework import losses
from framework.core import NetworksFn
from framework.programs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.types import Transition


@dataclass(frozen=True)
class QRDQNConfig(DQNConfig):
    """Settings of QR-DQN, in addition to those of `DQNConfig`."""

    huber_delta: float = 1.0  # The paper's kappa: errors of quantiles beyond this count linearly.
    num_quantiles: int = 50  # K, the quantiles of each action. More: a finer distribution, slower.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 2, "num_quantiles")


class QRDQNNetworks(DQNNetworks):
    """Those of DQN, with quantiles `[N, A, K]` of the return of each action."""

    def __init__(self, config: QRDQNConfig, spec: EnvironmentSpec):
        super().__init__(config, spec, config.num_quantiles)

    def expected(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.mean(-1)


class QRDQN(DQN):
    """Distributional Q-learning with quantiles, for one discrete action per env."""

    config: QRDQNConfig

    def __init__(self, config: QRDQNConfig | None = None, networks_fn: NetworksFn | None = None):
        super().__init__(config or QRDQNConfig(), networks_fn)

    def make_networks(self, spec: EnvironmentSpec) -> QRDQNNetworks:
        members = ("actions", "num_actions", "q_network", "values", "outputs", "expected")
        return self.custom_networks(spec, QRDQNNetworks, members)

    def item_losses(
        self,
        networks: DQNNetworks,
        target: nn.Module,
        data: Transition,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """As `DQN.item_losses`. Priorities are the losses."""
        outputs = networks.outputs(data.observation)
        quantiles = losses.of_actions(outputs, data.action)
        targets = self.target_samples(networks, target, data)
        count = quantiles.shape[1]
        fractions = (torch.arange(count, device=quantiles.device) + 0.5) / count
        each = losses.quantile_huber(
            quantiles, fractions.expand_as(quantiles), targets, self.config.huber_delta
        )
        values = networks.expected(outputs.detach())
        errors = (targets.mean(1) - quantiles.detach().mean(1)).abs()
        metrics = {
            "q_mean": values.mean(),
            "td_error": errors.mean(),
            "spread": quantiles.detach().std(1, correction=0).mean(),
        }
        return each, each.detach(), metrics


PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": Preset(
        agent={
            "num_quantiles": 20,
            "samples_per_insert": 24.0,
            "learning_rate_decay": 50_000,
            "epsilon_decay": 12_000,
        },
        run={"envs_per_actor": 4, "max_env_steps": 50_000, "evaluate_period": 2_000},
    ),
    "minatar:Breakout": Preset({**MINATAR, "num_quantiles": 20}, MINATAR_RUN),
}
