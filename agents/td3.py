"""TD3 (Fujimoto et al., 2018) and DDPG (Lillicrap et al., 2016): deterministic policies from replay.

The policy follows the slope of the critic's value along the action. TD3 adds three parts to DDPG: twin
critics of which the smaller value counts, a policy that learns less often than the critics, and noise on the
target policy's actions. Each is a field of the config; `DDPGConfig` turns all of them off.

One learner step follows the gradient of the sum of both losses. Each loss has its own parameters, so the
result equals two optimizers'. Until learning begins, actions are uniformly random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from framework import config_checks as check
from framework import losses, networks, replay
from framework.learners import LossContext, LossOutput
from framework.networks import DeterministicHead, PolicyNetwork, frozen
from framework.runs.presets import CONTROL_RUN, MUJOCO, Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import ControlConfig, OffPolicyAgent, TorchPolicy
from framework.types import Nest, Transition


@dataclass(frozen=True)
class TD3Config(ControlConfig):
    """Settings of TD3, in addition to `ControlConfig`'s. Noise is for actions in [-1, 1]."""

    # What is learned from.
    prioritized: bool = False  # Draws items with large errors more often.
    priority_exponent: float = 0.6  # 0 draws uniformly, 1 proportionally to the error.
    importance_sampling_exponent: float = 0.4  # Exponent of the importance weights; 1 is a full correction.

    # Learning.
    learning_rate: float = 1e-3  # Initial learning rate of the policy (Adam).
    actor_delay: int = 2  # Learner steps per update of the policy. More: it follows better values, later.
    target_update_period: int = 2  # Learner steps between updates of the target policy and critics.
    # Std of the noise on target actions. 0: the policy can exploit sharp peaks of values.
    smoothing_std: float = 0.2
    smoothing_clip: float = 0.5  # That noise is clipped to +- this.

    # Exploration.
    exploration_std: float = 0.1  # Standard deviation of the noise on the policy's actions.
    exploration_correlation: float = 0.0  # Correlation of that noise across steps; DDPG's paper: 0.85.
    exploration_ladder: float = 0.0  # Env i of all B multiplies exploration_std by 1 + this * i / (B - 1).

    # Networks.
    layer_norm: bool = False  # Normalizes the hidden layers of policy and critics: more stable, slower.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "actor_delay")
        check.at_least(self, 0, "smoothing_std", "exploration_std")
        check.at_least(self, 0, "exploration_ladder", "priority_exponent")
        check.above(self, 0, "smoothing_clip")
        check.fraction(self, "exploration_correlation", "importance_sampling_exponent")
        if self.exploration_correlation == 1:
            raise ValueError(
                f"exploration_correlation: got {self.exploration_correlation!r}, expected less than 1: the "
                "noise would stay 0. Use a value below 1."
            )


class TD3Networks(nn.Module):
    """The variables of TD3: `policy` and `critics`.

    Args:
      config: settings of the networks.
      spec: the spec of one env.
      outputs_per_action: K, the number of each critic's outputs for an action.

    Attributes:
      normalizes_policy: whether `layer_norm` is for the policy, too, and not for the critics only.
    """

    normalizes_policy: ClassVar[bool] = True

    def __init__(self, config: TD3Config, spec: EnvironmentSpec, outputs_per_action: int = 1):
        super().__init__()
        self.actions = networks.make_squashed_actions(
            spec.actions, type(config).__name__.removesuffix("Config")
        )
        seen, size = spec.observations, self.actions.head_spec.shape[0]
        body, critic_body = (
            networks.make_body(config.network, layer_norm=config.layer_norm and normalizes)
            for normalizes in (self.normalizes_policy, True)
        )
        self.policy = PolicyNetwork(
            seen, config.hidden_sizes, lambda width: DeterministicHead(width, size), body
        )
        self.critics = networks.Critics(
            seen, size, config.critic_sizes, config.num_critics, critic_body, None, outputs_per_action
        )

    def values(self, observation: Nest, action: torch.Tensor) -> torch.Tensor:
        """Values `[N]` of actions `[N, D]` by the first critic, from which the policy learns."""
        return self.critics(observation, action)[0]


class TD3Policy(TorchPolicy):
    """Acts with the policy network, and adds Gaussian noise except in evaluations.

    Args:
      networks: the networks, which the policy reads at each step.
      config: settings of the noise.
      evaluation: whether to act without noise, also before learning begins.
    """

    def __init__(self, networks: TD3Networks, config: TD3Config, evaluation: bool = False):
        super().__init__(networks, networks.actions, variables=("policy",))
        self._policy, self._config, self._greedy = networks.policy, config, evaluation
        self._size = networks.actions.head_spec.shape[0]

    def initial_state(self, batch_size: int) -> Nest:
        """Each env's std `[B, 1]` and last noise `[B, D]`; `()` if all envs explore alike, without memory.

        As part of the state, they stay with their env, also in a batch with other actors' envs.
        """
        config = self._config
        if self._greedy or not (config.exploration_ladder or config.exploration_correlation):
            return ()
        place = torch.arange(batch_size, device=self.device).unsqueeze(1) / max(batch_size - 1, 1)
        std = config.exploration_std * (1.0 + config.exploration_ladder * place)
        return {"std": std, "noise": torch.zeros((batch_size, self._size), device=self.device)}

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        return self.explore(self._policy(observation), state)

    def explore(self, action: torch.Tensor, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        """What `act` returns if the policy network's actions are `action`, `[B, D]`."""
        config = self._config
        if self._greedy:
            return action, (), state
        if config.random_start and self.progress.version == 0:
            return torch.empty_like(action).uniform_(-1.0, 1.0, generator=self.random), (), state
        noise = networks.draw("normal", action.shape, action.device, self.random)
        std = config.exploration_std
        if len(state):
            # The discrete Ornstein-Uhlenbeck process, which approaches a standard normal.
            kept = config.exploration_correlation
            noise, std = kept * state["noise"] + math.sqrt(1.0 - kept**2) * noise, state["std"]
            state = {"std": std, "noise": noise}
        return (action + std * noise).clamp(-1.0, 1.0), (), state


class TD3(OffPolicyAgent):
    """Deterministic policy gradients with twin critics, a delayed policy and target policy smoothing.

    ```python
    agent = TD3(TD3Config(batch_size=256, exploration_std=0.1))
    config = programs.RunConfig(max_env_steps=20_000)
    program = programs.make_program(agent, "gymnasium:Pendulum-v1", config)
    ```
    """

    config: TD3Config = TD3Config()
    target_names: tuple[str, ...] = ("policy", "critics")
    learning_rates: ClassVar[Mapping[str, str]] = {
        "policy": "learning_rate",
        "critics": "critic_learning_rate",
    }

    def make_networks(self, spec: EnvironmentSpec) -> TD3Networks:
        return self.custom_networks(spec, TD3Networks, ("actions", "policy", "critics", "values"))

    def make_policy(self, networks: TD3Networks, evaluation: bool = False) -> TD3Policy:
        return TD3Policy(networks, self.config, evaluation)

    def learner_settings(self, networks: nn.Module) -> dict[str, Any]:
        return super().learner_settings(networks) | {"partial_gradients": self.config.actor_delay > 1}

    def make_sampler(self) -> Any:
        if self.config.prioritized:
            return replay.selectors.Prioritized(self.config.priority_exponent)
        return super().make_sampler()

    def critic_losses(
        self, networks: TD3Networks, target: nn.Module, data: Transition, next_actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The critics' losses `[N]`, priorities `[N]` and metrics of N `Transition`s.

        Args:
          networks: the networks that learn.
          target: the target network of `critics`.
          data: the transitions, on the device of the networks.
          next_actions: `[N, D]` actions in the next observations.
        """
        values = networks.critics(data.observation, networks.actions.drawn(data)).float()
        with torch.no_grad():
            next_values = target(data.next_observation, next_actions).float()
        errors = losses.clipped_double_q_errors(values, *self.rewards(data), next_values)
        metrics = {"q_mean": values.mean(), "q_spread": values.std(0, correction=0).mean()}
        return 0.5 * errors.square().sum(0), errors.detach().abs().mean(0), metrics

    def next_actions(self, observation: Nest, context: LossContext) -> torch.Tensor:
        """Actions `[N, ..., D]` of the target policy, with the noise of target policy smoothing."""
        config = self.config
        with torch.no_grad():
            actions = context.targets["policy"](observation)
            if not config.smoothing_std:
                return actions
            noise = context.normal_like(actions)
            return losses.smoothed_actions(actions, noise, config.smoothing_std, config.smoothing_clip)

    def loss(self, networks: TD3Networks, batch: replay.ReplaySample, context: LossContext) -> LossOutput:
        """The sum of the losses of critics and policy on a batch of `Transition`s."""
        config, data = self.config, batch.data
        next_actions = self.next_actions(data.next_observation, context)
        each, errors, metrics = self.critic_losses(networks, context.targets["critics"], data, next_actions)
        priorities = None
        if config.prioritized:
            weights = context.importance_weights(batch.info, config.importance_sampling_exponent)
            each, priorities = weights * each, losses.item_priorities(errors)
            metrics["importance_weight"] = weights.mean()
        critic = metrics["critic_loss"] = each.mean()
        if not context.is_due(config.actor_delay):
            return LossOutput(critic, metrics, priorities)
        actions = networks.policy(data.observation)
        with frozen(networks.critics):
            actor = losses.deterministic_policy_loss(networks.values(data.observation, actions))
        metrics["actor_loss"], metrics["saturation"] = actor, (actions.abs() > 0.99).float().mean()
        return LossOutput(critic + actor, metrics, priorities)


@dataclass(frozen=True)
class DDPGConfig(TD3Config):
    """Settings of DDPG: TD3's without what TD3 adds."""

    num_critics: int = 1  # Critics; targets use the smallest value. More: more conservative, slower.
    actor_delay: int = 1  # Learner steps per update of the policy. More: it follows better values, later.
    target_update_period: int = 1  # Learner steps between updates of the target policy and critics.
    # Std of the noise on target actions. 0: the policy can exploit sharp peaks of values.
    smoothing_std: float = 0.0


class DDPG(TD3):
    """Settings of TD3: one critic, and none of the three additions to deterministic policy gradients."""

    config: DDPGConfig = DDPGConfig()


PENDULUM = {
    "min_replay_size": 500,
    "batch_size": 128,
    "samples_per_insert": 128.0,
    "hidden_sizes": (64, 64),
    "critic_learning_rate": 2e-3,
}
PENDULUM_RUN = {"num_actors": 1, "envs_per_actor": 1, "max_env_steps": 20_000, "evaluate_period": 5_000}
HALF_CHEETAH = {"min_replay_size": 5_000, "batch_size": 128, "samples_per_insert": 128.0}
MUJOCO_RUN = {"num_actors": 1, "envs_per_actor": 1, "evaluate_period": 20_000}
# A learner step for every 2 env steps, which have 5 items each.
GOALS = {
    "hindsight_goals": 4,
    "discount": 0.95,
    "min_replay_size": 2_500,
    "batch_size": 128,
    "samples_per_insert": 12.8,
    "hidden_sizes": (64, 64),
    "learning_rate": 1e-3,
    "target_update_rate": 0.02,
}
GOALS_RUN = {
    "num_actors": 1,
    "envs_per_actor": 1,
    "evaluate_period": 2_500,
    "info_metrics": ("is_success",),
}
# Places differ by a tenth of a meter. Without statistics, SAC reached no goal within 4,000 steps.
FETCH_REACH = {**GOALS, "normalize_observations": True}
# The authors' code, which is newer than the paper. OurDDPG.py has the same settings for DDPG.
MUJOCO_TD3 = {"min_replay_size": 25_000, "learning_rate": 3e-4, "critic_learning_rate": 3e-4}
# Both agents have these.
PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset(PENDULUM, PENDULUM_RUN),
    "gymnasium:HalfCheetah-v5": Preset(HALF_CHEETAH, {**MUJOCO_RUN, "max_env_steps": 200_000}),
    "robotics:FetchReach-v4": Preset(
        {**FETCH_REACH, "exploration_std": 0.2}, {**GOALS_RUN, "max_env_steps": 5_000}
    ),
    # Policies of Hopper come and go if layers are not normalized. With them, correlated noise and a
    # decaying rate, seed 101 stayed at 3,047 or more from 180,000 steps on, and Walker2d's at 3,189.
    **dict.fromkeys(
        ("gymnasium:Hopper-v5", "gymnasium:Walker2d-v5"),
        Preset(
            agent={
                "n_step": 3,
                "min_replay_size": 10_000,
                "batch_size": 128,
                "samples_per_insert": 128.0,
                "exploration_std": 0.2,
                "exploration_correlation": 0.85,
                "learning_rate_decay": 300_000,
                "layer_norm": True,
            },
            run={**MUJOCO_RUN, "max_env_steps": 300_000},
        ),
    ),
    **dict.fromkeys(
        (MUJOCO, "dm_control:*"),
        Preset(MUJOCO_TD3, CONTROL_RUN, "Fujimoto et al. (2018), sfujim/TD3 of 2020"),
    ),
}
