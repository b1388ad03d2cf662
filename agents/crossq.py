"""CrossQ (Bhatt et al., 2024): SAC without target networks, with batch renormalization and wide critics.

The critics rate the actions taken and the policy's next actions in one pass, whose batch statistics are then
those of both. With them, targets need no slower copies of the critics, and one learner step per env step is
enough. The policy has batch renormalization, too; it acts by the running statistics, which the learner sends
with its parameters. Everything else is as in SAC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import tree

from agents.sac import SAC, SACConfig, SACNetworks
from agents.td3 import MUJOCO_RUN, PENDULUM, PENDULUM_RUN
from framework import config_checks as check
from framework import networks
from framework.learners import LossContext
from framework.networks import SquashedGaussian, batch_statistics
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.types import Nest, Transition


@dataclass(frozen=True)
class CrossQConfig(SACConfig):
    """Settings of CrossQ: SAC's, with the paper's defaults. There are no targets to update."""

    learning_rate: float = 1e-3  # Initial learning rate of the policy (Adam).
    adam_beta1: float = 0.5  # Decay of Adam's mean of gradients, for policy and critics. Less: less inertia.
    actor_delay: int = 3  # Learner steps per update of the policy and the temperature.
    # Hidden layers of each critic. None: hidden_sizes.
    critic_hidden_sizes: tuple[int, ...] | None = (2048, 2048)
    target_update_rate: float = 1.0  # It has no effect: there are no target networks.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fraction(self, "adam_beta1")
        check.one_of(self, ("mlp",), "network")
        check.one_of(self, (1,), "target_update_period", "target_update_rate")


class CrossQNetworks(SACNetworks):
    """The networks of SAC, with batch renormalization."""

    batch_renorm = True

    def __init__(self, config: CrossQConfig, spec: EnvironmentSpec):
        networks.make_squashed_actions(spec.actions, "CrossQ")  # It refuses discrete actions.
        super().__init__(config, spec)


class CrossQ(SAC):
    """SAC with batch renormalization in place of target networks.

    ```python
    agent = CrossQ(CrossQConfig(critic_hidden_sizes=(512, 512)))
    program = programs.make_program(agent, "gymnasium:Walker2d-v5", programs.RunConfig(max_env_steps=100_000))
    ```
    """

    config: CrossQConfig = CrossQConfig()
    networks_class = CrossQNetworks
    target_names = ()
    takes_action_masks = False

    def make_optimizer(self, networks: Any) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(networks)
        for group in optimizer.param_groups[:2]:  # Policy and critics; the temperature's has the usual one.
            group["betas"] = (self.config.adam_beta1, 0.999)
        return optimizer

    def critic_values(
        self, networks: SACNetworks, data: Transition, next_action: torch.Tensor, context: LossContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SAC.critic_values`, by the critics themselves and in one pass."""
        both = tree.map_structure(lambda *each: torch.cat(each), data.observation, data.next_observation)
        with batch_statistics(networks.critics):
            values = networks.critics(both, torch.cat([networks.actions.drawn(data), next_action]))
        return values.chunk(2, 1)

    def learning_policy(self, networks: SACNetworks, observation: Nest) -> SquashedGaussian:
        with batch_statistics(networks.policy):
            return super().learning_policy(networks, observation)


PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset(
        agent={**PENDULUM, "critic_learning_rate": 1e-3, "critic_hidden_sizes": (128, 128)},
        run={**PENDULUM_RUN, "max_env_steps": 8_000, "evaluate_period": 2_000},
    ),
    **dict.fromkeys(
        ("gymnasium:Hopper-v5", "gymnasium:Walker2d-v5"),
        Preset({"min_replay_size": 5_000}, {**MUJOCO_RUN, "max_env_steps": 100_000}),
    ),
}
