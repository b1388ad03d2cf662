"""TD7 (Fujimoto et al., 2023): TD3 that learns embeddings of observations and actions, SALE.

Next to policy and critics, TD7 learns an embedding of the observation, and one of the observation and the
action, which predicts the next observation's embedding. The critics see both, the policy the first, from
frozen copies that are updated together with the target networks, which keep the previous copies. Replay is
prioritized with the matching loss (LAP; Fujimoto et al., 2020), and bootstrapped values stay within the range
of the targets seen so far. The paper's policy checkpoints and its term for offline data are left out.
Everything else is as in TD3.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agents.td3 import PRESETS as TD3_PRESETS
from agents.td3 import TD3, TD3Config
from framework import config_checks as check
from framework import losses, networks, replay
from framework.learners import LossContext, LossOutput
from framework.networks import EmbeddedCritics, EmbeddedPolicy, StateActionEmbeddings
from framework.runs.presets import CONTROL_RUN, MUJOCO, Preset
from framework.specs import EnvironmentSpec
from framework.types import Nest, Transition


@dataclass(frozen=True)
class TD7Config(TD3Config):
    """Settings of TD7, in addition to `TD3Config`'s. Defaults are the paper's."""

    # What is learned from.
    min_replay_size: int = 25_000  # Items in replay before learning begins.
    prioritized: bool = True  # Draws items with large errors more often.
    priority_exponent: float = 0.4  # 0 draws uniformly, 1 proportionally to the error, which counts as >= 1.
    # Exponent of the importance weights. 0: Huber's loss already corrects for the priorities (LAP).
    importance_sampling_exponent: float = 0.0

    # Learning.
    learning_rate: float = 3e-4  # Initial learning rate of the policy (Adam).
    critic_learning_rate: float = 3e-4  # Initial learning rate of the critics (Adam).
    embedding_learning_rate: float = 3e-4  # Initial learning rate of the embeddings (Adam).
    target_update_period: int = 250  # Learner steps between updates of the targets and of the frozen copies.
    target_update_rate: float = 1.0  # Weight of the online networks in each target update; 1 copies them.
    clip_targets: bool = True  # Clips next values to the range of targets seen before the last target update.

    # Networks.
    embedding_size: int = 256  # Width of both embeddings.
    embedding_hidden_sizes: tuple[int, ...] = (256, 256)  # Hidden layers of both embeddings' networks.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "embedding_size", "embedding_hidden_sizes")
        check.at_least(self, 0, "embedding_learning_rate")
        for field in ("hidden_sizes", "critic_hidden_sizes"):
            if getattr(self, field) == ():
                check.refuse(self, field, ", expected at least one layer.")


class TargetRange(nn.Module):
    """The range of the value targets: the range seen so far, and the range in use."""

    seen: torch.Tensor
    used: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        # The largest values of -target and target: one maximum over all learners finds both.
        self.register_buffer("seen", torch.full((2,), -torch.inf))
        self.register_buffer("used", torch.zeros(2))  # Nothing is bootstrapped yet, as in the authors' code.

    def add(self, targets: torch.Tensor, context: LossContext) -> None:
        """Widens what was seen to hold the targets `[N]` of all learners."""
        largest = torch.stack([(-targets).amax(), targets.amax()])
        if context.largest is not None:
            largest = context.largest(largest)
        self.seen.copy_(torch.maximum(self.seen, largest))

    def clip(self, values: torch.Tensor) -> torch.Tensor:
        """The values, within the range in use."""
        return values.clamp(-self.used[0], self.used[1])


class TD7Networks(nn.Module):
    """The variables of TD7: `policy`, `critics`, `embeddings` and `target_range`."""

    def __init__(self, config: TD7Config, spec: EnvironmentSpec):
        super().__init__()
        self.actions = networks.make_squashed_actions(spec.actions, "TD7")
        observations, size = spec.observations, self.actions.head_spec.shape[0]
        self.embeddings = StateActionEmbeddings(
            observations, size, config.embedding_size, config.embedding_hidden_sizes
        )
        make_body = functools.partial(networks.make_body, config.network, layer_norm=config.layer_norm)
        self.policy = EmbeddedPolicy(observations, size, self.embeddings, config.hidden_sizes, make_body())
        self.critics = EmbeddedCritics(
            observations,
            size,
            self.embeddings,
            config.critic_sizes,
            config.num_critics,
            make_body(activation="elu"),
        )
        self.target_range = TargetRange()

    def values(self, observation: Nest, action: torch.Tensor) -> torch.Tensor:
        """Values `[N]` of actions `[N, D]`, from which the policy learns: the mean of all critics."""
        return self.critics(observation, action).mean(0)

    def renew(self) -> None:
        """Gives policy and critics the embeddings that have been learned, and widens the range in use."""
        self.policy.renew(self.embeddings)
        self.critics.renew(self.embeddings)
        self.target_range.used.copy_(self.target_range.seen)


class TD7(TD3):
    """Deterministic policy gradients on learned embeddings of observations and actions.

    ```python
    agent = TD7(TD7Config(min_replay_size=5_000))
    config = programs.RunConfig(max_env_steps=200_000)
    program = programs.make_program(agent, "gymnasium:HalfCheetah-v5", config)
    ```
    """

    config: TD7Config = TD7Config()
    learning_rates = {**TD3.learning_rates, "embeddings": "embedding_learning_rate"}

    def make_networks(self, spec: EnvironmentSpec) -> Any:
        members = ("actions", "policy", "critics", "values", "embeddings", "target_range", "renew")
        return self.custom_networks(spec, TD7Networks, members)

    def critic_losses(
        self, networks: Any, target: nn.Module, data: Transition, next_actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """As `TD3.critic_losses`, with Huber's loss. Priorities are the larger errors, at least 1 (LAP)."""
        values = networks.critics(data.observation, networks.actions.drawn(data)).float()
        with torch.no_grad():
            next_values = target(data.next_observation, next_actions).float()
            if self.config.clip_targets:
                next_values = networks.target_range.clip(next_values)
        errors = losses.clipped_double_q_errors(values, *self.rewards(data), next_values)
        targets = (values + errors)[0].detach()
        metrics = {
            "q_mean": values.mean(),
            "q_spread": values.std(0, correction=0).mean(),
            "target_min": targets.amin(),
            "target_max": targets.amax(),
        }
        return losses.huber(errors).sum(0), errors.detach().abs().amax(0).clamp(min=1.0), metrics

    def loss(self, networks: Any, batch: replay.ReplaySample, context: LossContext) -> LossOutput:
        """The sum of the losses of critics, policy and embeddings on a batch of `Transition`s."""
        data = batch.data
        if context.is_due(self.config.target_update_period, 0):
            # The targets were updated after the last step: they have the embeddings before these.
            networks.renew()
        result = super().loss(networks, batch, context)
        lowest, highest = result.metrics["target_min"], result.metrics["target_max"]
        networks.target_range.add(torch.stack([lowest, highest]), context)
        state = networks.embeddings.state(data.observation)
        predicted = networks.embeddings(state, networks.actions.drawn(data))
        with torch.no_grad():
            following = networks.embeddings.state(data.next_observation)
        embedding = losses.embedding_loss(predicted, following)
        metrics = {**result.metrics, "embedding_loss": embedding}
        return result._replace(loss=result.loss + embedding, metrics=metrics)


PRESETS: Mapping[str, Preset] = {
    "gymnasium:HalfCheetah-v5": TD3_PRESETS["gymnasium:HalfCheetah-v5"],
    # All settings are defaults.
    **dict.fromkeys((MUJOCO, "dm_control:*"), Preset({}, CONTROL_RUN, "Fujimoto et al. (2023), appendix A")),
}
