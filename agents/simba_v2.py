"""SimBaV2 (Lee et al., 2025): SAC on the unit sphere, with distributions of the return and scaled rewards.

Features and the weights of each unit have norm 1, so that neither grows while targets move. Critics give the
probability of each of K returns, as in C51 (Bellemare et al., 2017), and rewards are divided so that returns
stay within these: gradients are then of one size whatever the rewards are. `network` alone is also a setting
of SAC, TD3, D4PG and TD7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agents.sac import SAC, SACConfig, SACNetworks
from agents.td3 import PENDULUM, PENDULUM_RUN
from framework import adders, losses, networks
from framework import config_checks as check
from framework.learners import LossContext, LossOutput
from framework.replay import ReplaySample
from framework.replay.contracts import ReplayClient
from framework.runs.presets import CONTROL_RUN, MUJOCO, Preset
from framework.specs import EnvironmentSpec


@dataclass(frozen=True)
class SimBaV2Config(SACConfig):
    """Settings of SimBaV2: SAC's, with the paper's defaults. The target entropy is half of SAC's."""

    normalize_observations: bool = True  # Scales observations to mean 0, variance 1 by running statistics.
    learning_rate: float = 1e-4  # Initial learning rate of the policy (Adam).
    critic_learning_rate: float = 1e-4  # Initial learning rate of the critics (Adam).
    temperature_learning_rate: float = 1e-4  # Learning rate of the temperature's logarithm (Adam).
    learning_rate_end: float = 0.5  # Final learning rate, as a fraction of the initial one.
    initial_temperature: float = 0.01  # Initial value of a learned temperature.
    num_atoms: int = 101  # K, the possible returns.
    largest_return: float = 5.0  # They lie between minus this and this. Rewards are divided to fit.
    network: str = "simba_v2"  # Blocks with features and weights of norm 1, one for each hidden size.
    hidden_sizes: tuple[int, ...] = (128,)  # Width of the policy, once for each block.
    critic_hidden_sizes: tuple[int, ...] | None = (512, 512)  # Width of each critic, once for each block.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 2, "num_atoms")
        check.above(self, 0, "largest_return")
        check.one_of(self, (1,), "n_step")


class SimBaV2Networks(SACNetworks):
    """The networks of SAC, with critics that give the logits `[C, N, K]` of the return of an action.

    Attributes:
      reward_scale: divides rewards; only the learner has it.
    """

    def __init__(self, config: SimBaV2Config, spec: EnvironmentSpec):
        networks.make_squashed_actions(spec.actions, "SimBaV2")  # It refuses discrete actions.
        super().__init__(config, spec, config.num_atoms)
        if config.target_entropy is None:
            self.target_entropy *= 0.5
        self.reward_scale = networks.BoundedRewardScale(config.largest_return)


class SimBaV2(SAC):
    """SAC with the networks, critics and rewards of SimBaV2.

    ```python
    agent = SimBaV2(SimBaV2Config(critic_hidden_sizes=(256, 256)))
    program = programs.make_program(agent, "gymnasium:Walker2d-v5", programs.RunConfig(max_env_steps=100_000))
    ```
    """

    config: SimBaV2Config = SimBaV2Config()
    networks_class = SimBaV2Networks
    takes_action_masks = False

    def make_networks(self, spec: EnvironmentSpec) -> SimBaV2Networks:
        members = ("actions", "policy", "critics", "temperature.log", "target_entropy", "reward_scale")
        return self.custom_networks(spec, self.networks_class, members)

    def make_adder(
        self, client: ReplayClient, spec: EnvironmentSpec, priority_fn: adders.PriorityFn | None = None
    ) -> adders.Adder:
        adder = super().make_adder(client, spec, priority_fn)
        return adders.RunningReturnAdder(adder, self.config.discount, reward_clip=self.config.reward_clip)

    def loss(self, networks: Any, batch: ReplaySample, context: LossContext) -> LossOutput:
        """SAC's losses, of scaled rewards. The scale is by the running returns of what is learned from."""
        data, reward = batch.data, batch.data.reward.float()
        returns = self.config.discount * data.extras[adders.RUNNING_RETURN] + reward
        networks.reward_scale.update(returns, context.total, context.largest)
        data = data._replace(reward=networks.reward_scale(reward))
        return super().loss(networks, batch._replace(data=data), context)

    def expected(self, values: torch.Tensor) -> torch.Tensor:
        return losses.expected_returns(values, self.atoms(values))

    def atoms(self, values: torch.Tensor) -> torch.Tensor:
        """The K possible returns, on the device of `values`."""
        largest = self.config.largest_return
        return torch.linspace(-largest, largest, self.config.num_atoms, device=values.device)

    def followed_values(self, values: torch.Tensor) -> torch.Tensor:
        return super().followed_values(self.expected(values))

    def next_soft(
        self, values: torch.Tensor, log_prob: torch.Tensor, temperature: torch.Tensor, context: LossContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities `[N, K]` of the critics with the least expected returns, and entropy terms `[N]`."""
        values = self.chosen(values, context)
        least = self.expected(values).argmin(0)
        chosen = values[least, torch.arange(len(least), device=least.device)]
        return chosen.softmax(-1), -temperature * log_prob

    def critic_loss(
        self,
        values: torch.Tensor,
        rewards: torch.Tensor,
        discounts: torch.Tensor,
        next_soft: Any,
    ) -> torch.Tensor:
        return losses.soft_categorical_critic_loss(values, self.atoms(values), rewards, discounts, *next_soft)


_SMALL = {"hidden_sizes": (64,), "critic_hidden_sizes": (64,), "learning_rate": 1e-3}
PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset(
        agent={**PENDULUM, **_SMALL, "critic_learning_rate": 1e-3, "temperature_learning_rate": 1e-3},
        run={**PENDULUM_RUN, "max_env_steps": 8_000, "evaluate_period": 2_000},
    ),
    MUJOCO: Preset(
        {"min_replay_size": 5_000, "discount": 0.995, "learning_rate_decay": 1_000_000},
        CONTROL_RUN,
        "Lee et al. (2025), simbaV2.yaml of the authors' code",
    ),
}
