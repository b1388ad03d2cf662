"""IQL: implicit Q-learning (Kostrikov et al., 2022), for continuous and discrete actions.

Nothing asks for the value of an action that is not in the data. A value network follows an upper expectile of
the critics over the data's actions, the critics follow that value, and the policy follows the likelihood of
the data's actions, weighted by the exponent of their advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from dm_env import specs as dm_specs
from torch import nn

from agents.td3 import PENDULUM, PENDULUM_RUN
from framework import config_checks as check
from framework import losses, networks
from framework.learners import LossContext, LossOutput
from framework.networks import MLP, GaussianHead, ObservationEncoder, PolicyNetwork
from framework.replay import ReplaySample
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import OffPolicyAgent, OffPolicyConfig, TorchPolicy
from framework.types import Nest


@dataclass(frozen=True)
class IQLConfig(OffPolicyConfig):
    """Settings of IQL, in addition to `OffPolicyConfig`'s: the paper's, for D4RL's MuJoCo tasks."""

    max_replay_size: int = 1_000_000  # Maximum number of items; the oldest are removed first.
    batch_size: int = 256  # Items per learner step.
    samples_per_insert: float = 256.0  # Draws of an item. Divided by batch_size: learner steps per item.
    insert_burst: int = 32  # Items by which inserts may lead or trail the ratio; also the limit in flight.
    learning_rate: float = 3e-4  # Initial learning rate of the policy (Adam).
    critic_learning_rate: float = 3e-4  # Initial learning rate of critics and value (Adam).
    target_update_rate: float = 0.005  # Weight of the online critics in each target update; 1 copies them.
    target_update_period: int = 1  # Learner steps between updates of the target critics.
    expectile: float = 0.7  # 0.5 is the mean of the values of the data's actions; near 1, their maximum.
    temperature: float = 3.0  # Weight of advantages in the exponent. 0 clones the data.
    largest_weight: float = 100.0  # Largest weight of an item in the policy's loss.
    hidden_sizes: tuple[int, ...] = (256, 256)  # Hidden layers of policy, critics and value.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "hidden_sizes")
        check.at_least(self, 0, "critic_learning_rate", "temperature")
        check.above(self, 0, "largest_weight")
        check.fraction(self, "expectile")


class Value(nn.Module):
    """Observation `[..., *]` to its value `[...]`."""

    def __init__(self, config: IQLConfig, spec: EnvironmentSpec):
        super().__init__()
        self.encoder = ObservationEncoder(spec.observations)
        self.head = MLP(self.encoder.output_size, config.hidden_sizes, 1)

    def forward(self, observation: Nest) -> torch.Tensor:
        return self.head(self.encoder(observation)).squeeze(-1)


class IQLNetworks(nn.Module):
    """The variables of IQL: `policy`, `critics` and `value`."""

    def __init__(self, config: IQLConfig, spec: EnvironmentSpec):
        super().__init__()
        self.actions: Any
        size, num_actions, make_head = 0, None, None
        if isinstance(spec.actions, dm_specs.DiscreteArray):
            self.actions, num_actions = networks.Actions(spec.actions), int(spec.actions.num_values)
        else:
            self.actions = networks.make_squashed_actions(spec.actions, "IQL, or one discrete action")
            size = self.actions.head_spec.shape[0]
            # The mean is squashed and the standard deviation depends on nothing.
            make_head = lambda width: GaussianHead(width, size, tanh_mean=True)  # noqa: E731
        self.policy = PolicyNetwork(
            spec.observations, config.hidden_sizes, make_head or self.actions.make_head
        )
        self.critics = networks.Critics(
            spec.observations, size, config.hidden_sizes, 2, num_actions=num_actions
        )
        self.value = Value(config, spec)


class IQLPolicy(TorchPolicy):
    """Samples from the policy network, or takes its mode.

    Args:
      networks: the networks, which the policy reads at each step.
      evaluation: whether to take the mode.
    """

    def __init__(self, networks: IQLNetworks, evaluation: bool = False):
        super().__init__(networks, networks.actions, variables=("policy",))
        self._policy, self._greedy = networks.policy, evaluation

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        distribution = self._policy(observation)
        action = distribution.mode() if self._greedy else distribution.sample(self.random)
        return action.clamp(-1.0, 1.0) if self.actions.continuous else action, (), state


class IQL(OffPolicyAgent):
    """Implicit Q-learning.

    ```python
    config = programs.RunConfig(dataset="data/hopper-medium-replay", max_learner_steps=200_000)
    program = programs.make_program(IQL(), "gymnasium:Hopper-v5", config)
    ```
    """

    config: IQLConfig = IQLConfig()
    target_names = ("critics",)
    learning_rates: ClassVar[Mapping[str, str]] = {
        "policy": "learning_rate",
        "critics": "critic_learning_rate",
        "value": "critic_learning_rate",
    }
    takes_action_masks = True

    def make_networks(self, spec: EnvironmentSpec) -> IQLNetworks:
        return self.custom_networks(spec, IQLNetworks, ("actions", "policy", "critics", "value"))

    def make_policy(self, networks: IQLNetworks, evaluation: bool = False) -> IQLPolicy:
        return IQLPolicy(networks, evaluation)

    def loss(self, networks: IQLNetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The sum of the losses of value (equation 5), critics (6) and policy (7) of `Transition`s."""
        config, data = self.config, batch.data
        actions = networks.actions.drawn(data)
        with torch.no_grad():
            known = _of(context.targets["critics"], data.observation, actions).min(0).values
            next_value = networks.value(data.next_observation)
        values = networks.value(data.observation)
        value_loss = losses.expectile_loss(known - values, config.expectile).mean()
        rewards, discounts = self.rewards(data)
        errors = (
            rewards
            + losses.discounted(discounts, next_value)
            - _of(networks.critics, data.observation, actions)
        )
        critic_loss = 0.5 * errors.square().sum(0).mean()
        advantages = known - values.detach()
        weights = (config.temperature * advantages).exp().clamp(max=config.largest_weight)
        actor_loss = -(weights * networks.policy(data.observation).log_prob(actions)).mean()
        metrics = {
            "value_loss": value_loss,
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "value_mean": values.mean(),
            "advantage": advantages.mean(),
            "weight": weights.mean(),
        }
        return LossOutput(value_loss + critic_loss + actor_loss, metrics)


def _of(critics: nn.Module, observation: Nest, actions: torch.Tensor) -> torch.Tensor:
    """Values `[2, N]` of `actions`: real ones `[N, D]`, or discrete ones `[N]`."""
    if actions.dim() > 1:
        found: torch.Tensor = critics(observation, actions).float()
        return found
    return critics(observation).float().gather(-1, actions.expand(2, -1).unsqueeze(-1)).squeeze(-1)


PRESETS: Mapping[str, Preset] = {
    # 500, greedy over 100 episodes, at 20,000 learner steps on data of 269.6, seeds 1 to 3.
    "gymnasium:CartPole-v1": Preset(
        {
            "batch_size": 128,
            "hidden_sizes": (64, 64),
            "learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
        }
    ),
    # -155.2, greedy over 100 episodes, the best of 20,000 learner steps on data of -585.9, seed 1.
    "gymnasium:Pendulum-v1": Preset({**PENDULUM, "learning_rate": 1e-3}, PENDULUM_RUN),
}
