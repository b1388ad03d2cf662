"""SAC: soft actor-critic (Haarnoja et al., 2018), for continuous and discrete actions.

The policy maximizes reward and entropy. The weight of the entropy, the *temperature*, is learned so that the
policy keeps a target entropy (Haarnoja et al., 2018b). Both critics learn from the smaller value of their
target networks (Fujimoto et al., 2018). With one discrete action (Christodoulou, 2019), the expectations over
actions are exact sums instead of samples, and nothing else differs.

One learner step follows the gradient of the sum of all losses. Each loss has its own parameters, so the
result equals three optimizers'. Until learning begins, actions are uniformly random.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from dm_env import specs as dm_specs
from torch import nn

from agents.d4pg import DM_CONTROL_RUN
from agents.td3 import FETCH_REACH, GOALS, GOALS_RUN, HALF_CHEETAH, MUJOCO_RUN, PENDULUM, PENDULUM_RUN
from framework import config_checks as check
from framework import losses, networks
from framework.learners import LossContext, LossOutput
from framework.networks import PolicyNetwork, SquashedGaussian, dropout, frozen, legal_actions, random_actions
from framework.replay import ReplaySample
from framework.runs.presets import CONTROL_RUN, MUJOCO, Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import ControlConfig, OffPolicyAgent, TorchPolicy
from framework.types import Nest, Transition


@dataclass(frozen=True)
class SACConfig(ControlConfig):
    """Settings of SAC, in addition to `ControlConfig`'s."""

    # What is learned from.
    reward_scale: float = 1.0  # Rewards are multiplied by this in the learner. Larger weighs entropy less.

    # Learning.
    learning_rate: float = 3e-4  # Initial learning rate of the policy (Adam).
    # Critics, drawn at each step, of which a target takes the smallest; the policy then follows the mean
    # (REDQ; Chen et al., 2021). None: all, for the policy, too (SAC-N; An et al., 2021).
    target_critics: int | None = None
    actor_delay: int = 1  # Learner steps per update of the policy and the temperature.

    # Entropy.
    temperature: float | None = None  # A fixed weight of the entropy; None learns it.
    initial_temperature: float = 1.0  # Initial value of a learned temperature.
    temperature_learning_rate: float = 1e-3  # Learning rate of the temperature's logarithm (Adam).
    # In nats, of actions in [-1, 1]. None: minus the number of action dimensions or, for discrete actions,
    # half of the logarithm of their number.
    target_entropy: float | None = None

    # Networks.
    layer_norm: bool = False  # Normalizes the critics' hidden layers: more stable with many updates per step.
    dropout: float = 0.0  # Share of the critics' hidden units that each pass of the learner drops (DroQ).

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "target_critics", "actor_delay")
        check.fraction(self, "dropout")
        if self.dropout == 1 or (self.dropout and self.network != "mlp"):
            check.refuse(self, "dropout", ", expected less than 1, and 0 with a network other than 'mlp'.")
        check.ordered(self, "target_critics", "num_critics")
        check.at_least(self, 0, "temperature_learning_rate")
        check.above(self, 0, "reward_scale", "temperature", "initial_temperature")


class Temperature(nn.Module):
    """Logarithm of the weight of the entropy: a parameter if it is learned."""

    log: torch.Tensor

    def __init__(self, config: SACConfig):
        super().__init__()
        if config.temperature is None:
            self.log = nn.Parameter(torch.tensor(math.log(config.initial_temperature)))
        else:
            # A resumed run may have another temperature, so it is not saved.
            self.register_buffer("log", torch.tensor(math.log(config.temperature)), persistent=False)


class SACNetworks(nn.Module):
    """The variables of SAC: `policy`, `critics` and `temperature`.

    Args:
      config: settings of the networks.
      spec: the spec of one env.
      outputs_per_action: K, the number of each critic's outputs for a continuous action.

    Attributes:
      target_entropy: the entropy, in nats, that the learned temperature maintains. The default for D real
        numbers in [-1, 1] is -D, as in the paper; for A discrete actions, half of the maximum log A.
      batch_renorm: whether policy and critics have batch renormalization, as CrossQ's.
    """

    batch_renorm: ClassVar[bool] = False

    def __init__(self, config: SACConfig, spec: EnvironmentSpec, outputs_per_action: int = 1):
        super().__init__()
        discrete = isinstance(spec.actions, dm_specs.DiscreteArray)
        self.actions = (
            networks.Actions(spec.actions)
            if discrete
            else networks.make_squashed_actions(
                spec.actions, "SAC, or one discrete action (--wrappers CombineActions makes one of several)"
            )
        )
        body = functools.partial(networks.make_body, config.network, batch_renorm=self.batch_renorm)
        critic_body = body(layer_norm=config.layer_norm, dropout=config.dropout)
        self.policy = PolicyNetwork(spec.observations, config.hidden_sizes, self.actions.make_head, body())
        num_actions = int(spec.actions.num_values) if discrete else None
        size = 0 if discrete else self.actions.head_spec.shape[0]
        entropy = -float(size) if num_actions is None else 0.5 * math.log(num_actions)
        sizes, count = config.critic_sizes, config.num_critics
        self.critics = networks.Critics(
            spec.observations, size, sizes, count, critic_body, num_actions, outputs_per_action
        )
        self.target_entropy = entropy if config.target_entropy is None else config.target_entropy
        self.temperature = Temperature(config)


class SACPolicy(TorchPolicy):
    """Samples actions from the policy network, or takes its mode.

    Args:
      networks: the networks, which the policy reads at each step.
      random_start: whether actions are uniformly random until learning begins.
      evaluation: whether to take the mode, also before learning begins.
    """

    def __init__(self, networks: SACNetworks, random_start: bool = True, evaluation: bool = False):
        super().__init__(networks, networks.actions, variables=("policy",))
        self._policy = networks.policy
        self._random_start, self._greedy = random_start, evaluation

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        distribution = self._policy(observation)
        if self._greedy:
            return distribution.mode(), (), state
        drawn = distribution.sample(self.random)
        if self._random_start and self.progress.version == 0:
            if self.actions.continuous:
                drawn = torch.empty_like(drawn).uniform_(-1.0, 1.0, generator=self.random)
            else:
                drawn = random_actions(distribution.logits, observation, self.random)
        return drawn, (), state


class SAC(OffPolicyAgent):
    """Soft actor-critic.

    ```python
    agent = SAC(SACConfig(batch_size=256, samples_per_insert=512.0))      # two learner steps per env step
    config = programs.RunConfig(max_env_steps=20_000)
    program = programs.make_program(agent, "gymnasium:Pendulum-v1", config)
    ```
    """

    config: SACConfig = SACConfig()
    networks_class: type[SACNetworks] = SACNetworks
    target_names: tuple[str, ...] = ("critics",)
    learning_rates = {
        "policy": "learning_rate",
        "critics": "critic_learning_rate",
        "temperature": "temperature_learning_rate",
    }
    takes_action_masks = True

    def make_networks(self, spec: EnvironmentSpec) -> SACNetworks:
        members = ("actions", "policy", "critics", "temperature.log", "target_entropy")
        return self.custom_networks(spec, self.networks_class, members)

    def make_policy(self, networks: SACNetworks, evaluation: bool = False) -> SACPolicy:
        return SACPolicy(networks, self.config.random_start, evaluation)

    def learner_settings(self, networks: nn.Module) -> dict[str, Any]:
        return super().learner_settings(networks) | {"partial_gradients": self.config.actor_delay > 1}

    def loss(self, networks: SACNetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The sum of the losses of critics, policy and temperature on a batch of `Transition`s."""
        config, data = self.config, batch.data
        rewards, discounts = self.rewards(data)
        rewards = config.reward_scale * rewards
        parts = self._continuous if networks.actions.continuous else self._discrete
        raters = (networks.critics, context.targets) if config.dropout else ()
        with dropout(raters, context.uniform_like):
            values, next_soft, actor, log_probs = parts(networks, data, context)
        critic = self.critic_loss(values, rewards, discounts, next_soft)
        metrics = {
            "critic_loss": critic,
            "q_mean": (q_values := self.expected(values)).mean(),
            "q_spread": q_values.std(0, correction=0).mean(),
            "temperature": networks.temperature.log.exp(),
        }
        if actor is None:
            return LossOutput(critic, metrics)
        metrics["actor_loss"], metrics["entropy"] = actor, -log_probs.mean()
        total = critic + actor
        if config.temperature is None:
            log_temperature = networks.temperature.log
            target: Any = networks.target_entropy
            if (legal := legal_actions(data.observation)) is not None:
                # The same share of the largest entropy.
                count = (legal > 0).sum(-1).clamp(min=1)
                target = target * count.log() / math.log(max(legal.shape[-1], 2))
            total = total + losses.sac_temperature_loss(log_temperature, log_probs, target)
        return LossOutput(total, metrics)

    def _continuous(self, networks: SACNetworks, data: Transition, context: LossContext) -> tuple[Any, ...]:
        """Losses' inputs for continuous actions.

        Returns:
          Values of the actions taken `[C, N]`, soft values of the next observations `[N]`, the policy's loss,
          and the log-probabilities of its actions `[N]`. The last two are None unless the policy is updated.
        """

        def drawn(policy: SquashedGaussian) -> tuple[torch.Tensor, torch.Tensor]:
            return policy.rsample_with_log_prob(noise=context.normal_like(policy.base.mean))

        temperature = networks.temperature.log.exp()
        with torch.no_grad():
            next_action, next_log_prob = drawn(networks.policy(data.next_observation))
        values, next_values = self.critic_values(networks, data, next_action, context)
        with torch.no_grad():
            next_soft = self.next_soft(next_values, next_log_prob, temperature, context)
        if not context.is_due(self.config.actor_delay):
            return values, next_soft, None, None
        action, log_prob = drawn(self.learning_policy(networks, data.observation))
        with frozen(networks.critics):
            own_values = self.followed_values(networks.critics(data.observation, action))
        return values, next_soft, losses.sac_actor_loss(log_prob, own_values, temperature), log_prob

    def critic_values(
        self, networks: SACNetworks, data: Transition, next_action: torch.Tensor, context: LossContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values `[C, N]` of the actions taken, and of `next_action` `[N, D]` for the targets."""
        with torch.no_grad():
            next_values = context.targets["critics"](data.next_observation, next_action)
        return networks.critics(data.observation, networks.actions.drawn(data)), next_values

    def learning_policy(self, networks: SACNetworks, observation: Nest) -> SquashedGaussian:
        """The policy's distribution of continuous actions, from which it learns."""
        policy: SquashedGaussian = networks.policy(observation)
        return policy

    def next_soft(self, values: Any, log_prob: torch.Tensor, temperature: Any, context: LossContext) -> Any:
        """What `critic_loss` gets of next actions with `log_prob` `[N]`, of target critics' `values`."""
        least = self.target_values(values, context)
        return losses.soft_value(least, log_prob.expand_as(least), temperature)

    def expected(self, values: torch.Tensor) -> torch.Tensor:
        """The expected returns of what the critics give, for metrics."""
        return values

    def critic_loss(
        self, values: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor, next_soft: torch.Tensor
    ) -> torch.Tensor:
        """The critics' loss, of `values` `[C, N]` and soft values of the next observations `[N]`."""
        return losses.sac_critic_loss(values, rewards, discounts, next_soft)

    def _discrete(self, networks: SACNetworks, data: Transition, context: LossContext) -> tuple[Any, ...]:
        """As `_continuous`, with exact sums over actions, and minus the entropy as log-probabilities."""
        temperature = networks.temperature.log.exp()
        with torch.no_grad():
            next_values = self.target_values(context.targets["critics"](data.next_observation), context)
            next_logits = networks.policy(data.next_observation).logits
            next_soft = losses.discrete_soft_value(next_values, next_logits, temperature)
        all_values = networks.critics(data.observation)
        taken = networks.actions.drawn(data).expand(len(all_values), -1).unsqueeze(-1)
        values = all_values.gather(-1, taken).squeeze(-1)
        if not context.is_due(self.config.actor_delay):
            return values, next_soft, None, None
        distribution = networks.policy(data.observation)
        own_values = self.followed_values(all_values)
        actor = losses.sac_discrete_actor_loss(distribution.logits, own_values, temperature)
        return values, next_soft, actor, -distribution.entropy()

    def target_values(self, values: torch.Tensor, context: LossContext) -> torch.Tensor:
        """The values `[...]` of targets, of the target critics' `[C, ...]`."""
        return self.chosen(values, context).amin(0)

    def chosen(self, values: torch.Tensor, context: LossContext) -> torch.Tensor:
        """The values of the critics drawn for a target, `target_critics` of all `[C, ...]`."""
        if (count := self.config.target_critics) is None:
            return values
        return values[context.normal(len(values)).topk(count).indices]

    def followed_values(self, values: torch.Tensor) -> torch.Tensor:
        """The values `[...]` that the policy follows, of the critics' `[C, ...]`."""
        return values.amin(0) if self.config.target_critics is None else values.mean(0)


PRESETS: Mapping[str, Preset] = {
    # -157.9 to -160.7, greedy over 100 episodes, at 20,000 steps on seeds 1 to 5.
    **dict.fromkeys(
        ("gymnasium:Pendulum-v1", "testing:BadlyScaledPendulum"),
        Preset({**PENDULUM, "learning_rate": 1e-3}, PENDULUM_RUN),
    ),
    # 7,951 to 8,400, greedy over 100 episodes, at 200,000 steps on seeds 1 to 3.
    "gymnasium:HalfCheetah-v5": Preset(HALF_CHEETAH, {**MUJOCO_RUN, "max_env_steps": 200_000}),
    # At a temperature of 1, the entropy outweighs rewards of -1 for the first 5,000 learner steps.
    "robotics:FetchReach-v4": Preset(
        {**FETCH_REACH, "initial_temperature": 0.05}, {**GOALS_RUN, "max_env_steps": 5_000}
    ),
    "tasks:PointMaze": Preset(
        {**GOALS, "initial_temperature": 0.05, "samples_per_insert": 25.6},
        {**GOALS_RUN, "max_env_steps": 5_000},
    ),
    # A learner step for every 2 env steps, as D4PG's.
    "dm_control:walker/walk": Preset(
        agent={"batch_size": 128, "samples_per_insert": 64.0, "min_replay_size": 2_000},
        run={**DM_CONTROL_RUN, "max_env_steps": 100_000, "evaluate_period": 10_000},
    ),
    **dict.fromkeys(
        (MUJOCO, "dm_control:*"),
        Preset(
            {
                "min_replay_size": 10_000,
                "learning_rate": 3e-4,
                "critic_learning_rate": 3e-4,
                "temperature_learning_rate": 3e-4,
            },
            CONTROL_RUN,
            "Haarnoja et al. (2018b), table 1",
            {"Achiam (2018), Spinning Up": "min_replay_size"},
        ),
    ),
}
