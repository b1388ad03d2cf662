"""TQC: truncated quantile critics (Kuznetsov et al., 2020), SAC with distributions of the return.

Each critic gives M quantiles of the return. Targets are the quantiles of all target critics together,
without the largest: how many are dropped sets how conservative values are, in finer steps than the number of
critics of which the smallest counts. The policy follows the mean of all quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from agents.sac import SAC, SACConfig, SACNetworks
from agents.td3 import MUJOCO_RUN, PENDULUM, PENDULUM_RUN
from framework import config_checks as check
from framework import losses, networks
from framework.learners import LossContext
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec


@dataclass(frozen=True)
class TQCConfig(SACConfig):
    """Settings of TQC: SAC's, with the paper's defaults."""

    critic_learning_rate: float = 3e-4  # Initial learning rate of the critics (Adam).
    temperature_learning_rate: float = 3e-4  # Learning rate of the temperature's logarithm (Adam).
    num_critics: int = 5  # Critics, whose quantiles make one target. More: better values, slower.
    target_critics: int | None = None  # Critics, drawn at each step, that make the target. None: all.
    num_quantiles: int = 25  # M, the quantiles of each critic. More: a finer distribution, slower.
    # Quantiles left out of a target, for each critic: the largest of all. More: more conservative.
    dropped_quantiles: int = 2
    # Hidden layers of each critic. None: hidden_sizes.
    critic_hidden_sizes: tuple[int, ...] | None = (512, 512, 512)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 2, "num_quantiles")
        check.at_least(self, 0, "dropped_quantiles")
        if self.dropped_quantiles >= self.num_quantiles:
            check.refuse(
                self, "dropped_quantiles", f", expected less than num_quantiles {self.num_quantiles}."
            )


class TQCNetworks(SACNetworks):
    """The networks of SAC, with critics that give quantiles `[C, N, M]` of the return of an action."""

    def __init__(self, config: TQCConfig, spec: EnvironmentSpec):
        networks.make_squashed_actions(spec.actions, "TQC")  # It refuses discrete actions.
        super().__init__(config, spec, config.num_quantiles)


class TQC(SAC):
    """SAC whose targets are truncated distributions.

    ```python
    agent = TQC(TQCConfig(num_critics=5, dropped_quantiles=2))
    program = programs.make_program(agent, "gymnasium:Walker2d-v5", programs.RunConfig(max_env_steps=300_000))
    ```
    """

    config: TQCConfig = TQCConfig()
    networks_class = TQCNetworks
    takes_action_masks = False

    def target_values(self, values: torch.Tensor, context: LossContext) -> torch.Tensor:
        """Quantiles `[K, N]` of targets, of the target critics' `[C, N, M]`."""
        return losses.truncated_quantiles(self.chosen(values, context), self.config.dropped_quantiles).T

    def followed_values(self, values: torch.Tensor) -> torch.Tensor:
        """The means `[N]` of the critics' quantiles `[C, N, M]`."""
        return values.mean((0, -1))

    def critic_loss(
        self, values: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor, next_soft: torch.Tensor
    ) -> torch.Tensor:
        return losses.tqc_critic_loss(values, rewards, discounts, next_soft.T)


_MUJOCO_RUN = {**MUJOCO_RUN, "max_env_steps": 100_000}
PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset(
        agent={
            **PENDULUM,
            "learning_rate": 1e-3,
            "num_critics": 3,
            "num_quantiles": 10,
            "dropped_quantiles": 1,
            "critic_hidden_sizes": (64, 64),
        },
        run={**PENDULUM_RUN, "max_env_steps": 8_000, "evaluate_period": 2_000},
    ),
    # The paper's numbers of dropped quantiles.
    "gymnasium:HalfCheetah-v5": Preset({"min_replay_size": 10_000, "dropped_quantiles": 0}, _MUJOCO_RUN),
    "gymnasium:Hopper-v5": Preset({"min_replay_size": 10_000, "dropped_quantiles": 5}, _MUJOCO_RUN),
    "gymnasium:Walker2d-v5": Preset({"min_replay_size": 10_000}, _MUJOCO_RUN),
}
