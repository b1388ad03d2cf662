"""SimBa (Lee et al., 2024): SAC with residual blocks, layer norm and normalized observations.

Each layer favors simple functions, so wide critics learn from few env steps. `network` is a setting of SAC,
TD3, D4PG and TD7: these are the paper's defaults for SAC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agents.sac import SAC, SACConfig
from agents.td3 import MUJOCO_RUN, PENDULUM, PENDULUM_RUN
from framework import config_checks as check
from framework.runs.presets import Preset


@dataclass(frozen=True)
class SimBaConfig(SACConfig):
    """Settings of SimBa: SAC's, with the paper's defaults but for its target entropy, half of SAC's."""

    normalize_observations: bool = True  # Scales observations to mean 0, variance 1 by running statistics.
    samples_per_insert: float = 512.0  # Draws of an item. Divided by batch_size: learner steps per item.
    learning_rate: float = 1e-4  # Initial learning rate of the policy (AdamW).
    critic_learning_rate: float = 1e-4  # Initial learning rate of the critics (AdamW).
    temperature_learning_rate: float = 1e-4  # Learning rate of the temperature's logarithm (AdamW).
    weight_decay: float = 0.01  # Share of the learning rate by which parameters shrink at each step.
    initial_temperature: float = 0.01  # Initial value of a learned temperature.
    network: str = "simba"  # Residual blocks with layer norms of their own, one for each hidden size.
    hidden_sizes: tuple[int, ...] = (128,)  # Width of the policy, once for each block.
    critic_hidden_sizes: tuple[int, ...] | None = (512, 512)  # Width of each critic, once for each block.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "weight_decay")


class SimBa(SAC):
    """SAC with the networks of SimBa.

    ```python
    agent = SimBa(SimBaConfig(critic_hidden_sizes=(256, 256)))
    program = programs.make_program(agent, "gymnasium:Walker2d-v5", programs.RunConfig(max_env_steps=100_000))
    ```
    """

    config: SimBaConfig = SimBaConfig()

    def make_optimizer(self, networks: Any) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(networks)
        for group in optimizer.param_groups:
            group.update(weight_decay=self.config.weight_decay, decoupled_weight_decay=True)
        return optimizer


_SMALL = {
    "hidden_sizes": (64,),
    "critic_hidden_sizes": (64,),
    "learning_rate": 1e-3,
    "samples_per_insert": 256.0,
}
_RUN = {**MUJOCO_RUN, "max_env_steps": 100_000}
PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset(
        agent={**PENDULUM, **_SMALL, "temperature_learning_rate": 1e-3},
        run={**PENDULUM_RUN, "max_env_steps": 8_000, "evaluate_period": 2_000},
    ),
    "gymnasium:Hopper-v5": Preset({"min_replay_size": 5_000, "target_entropy": -1.5}, _RUN),
    "gymnasium:Walker2d-v5": Preset({"min_replay_size": 5_000, "target_entropy": -3.0}, _RUN),
}
