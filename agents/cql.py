"""CQL: conservative Q-learning (Kumar et al., 2020), for one discrete action.

DQN's loss on data, and a penalty on the values of actions that the data does not have, so that the greedy
policy does not follow values that nothing has corrected.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from agents.dqn import DQN, DQNConfig, DQNNetworks, ItemLosses
from framework import config_checks as check
from framework import losses
from framework.learners import LossContext
from framework.networks import mask_values
from framework.types import Transition


@dataclass(frozen=True)
class CQLConfig(DQNConfig):
    """Settings of CQL: DQN's, and the weight of the penalty."""

    batch_size: int = 256  # Items per learner step.
    learning_rate: float = 3e-4  # Initial learning rate of Adam.
    conservative_weight: float = 1.0  # Weight of the penalty. More: nearer to the data's actions.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "conservative_weight")


class CQL(DQN):
    """Conservative Q-learning.

    ```python
    config = programs.RunConfig(dataset="data/breakout-medium-replay", max_learner_steps=100_000)
    program = programs.make_program(CQL(), "minatar:Breakout", config)
    ```
    """

    config: CQLConfig = CQLConfig()

    def item_losses(
        self, networks: DQNNetworks, target: nn.Module, data: Transition, context: LossContext | None = None
    ) -> ItemLosses:
        """DQN's losses, with `conservative_weight` times `losses.conservative_penalty`."""
        each, priorities, metrics = super().item_losses(networks, target, data, context)
        values = mask_values(networks.values(data.observation), data.observation)
        penalties = losses.conservative_penalty(values, data.action.long())
        metrics["conservative_penalty"] = penalties.mean()
        return each + self.config.conservative_weight * penalties, priorities, metrics
