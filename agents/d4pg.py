"""D4PG: distributed distributional deterministic policy gradients (Barth-Maron et al., 2018).

The critic gives the probability of each of K returns between `v_min` and `v_max`, as in C51 (Bellemare et
al., 2017), for the action it sees. Its target is the n-step distribution of the target policy's action,
projected on these returns, and the loss is the cross entropy. The policy follows the slope of the expected
return. Everything else is as in DDPG (see `agents.td3`), with prioritized replay as an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from agents.td3 import PENDULUM, PENDULUM_RUN, TD3, TD3Config, TD3Networks
from framework import config_checks as check
from framework import losses
from framework.runs.presets import CONTROL_RUN, MUJOCO, Preset
from framework.specs import EnvironmentSpec
from framework.types import Nest, Transition


@dataclass(frozen=True)
class D4PGConfig(TD3Config):
    """Settings of D4PG. Defaults that differ from `TD3Config` are Acme's, or turn off what TD3 adds."""

    # What is learned from.
    n_step: int = 5  # Rewards summed before bootstrapping. More: faster propagation, but more off-policy.
    samples_per_insert: float = 32.0  # Draws of an item. Divided by batch_size: learner steps per item.

    # Learning.
    learning_rate: float = 1e-4  # Initial learning rate of the policy (Adam).
    critic_learning_rate: float = 1e-4  # Initial learning rate of the critics (Adam).
    num_critics: int = 1  # Critics; targets use the lowest expected return. More: more conservative.
    actor_delay: int = 1  # Learner steps per update of the policy. More: it follows better values, later.
    target_update_period: int = 100  # Learner steps between updates of the target policy and critics.
    target_update_rate: float = 1.0  # Weight of the online networks in each target update; 1 copies them.
    # Std of the noise on target actions. 0: the policy can exploit sharp peaks of values.
    smoothing_std: float = 0.0
    num_atoms: int = 51  # K, the possible returns.
    v_min: float = -150.0  # Smallest return that can be represented. Smaller ones count as this.
    v_max: float = 150.0  # Largest return that can be represented. Larger ones count as this.

    # Exploration.
    exploration_std: float = 0.3  # Standard deviation of the noise on the policy's actions.

    # Networks.
    layer_norm: bool = True  # Normalizes the hidden layers of policy and critics: more stable, slower.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 2, "num_atoms")
        check.return_limits(self)


class D4PGNetworks(TD3Networks):
    """The networks of TD3, with critics that give the logits `[C, N, K]` of the return of an action.

    Attributes:
      atoms: `[K]` possible returns.
    """

    atoms: torch.Tensor

    def __init__(self, config: D4PGConfig, spec: EnvironmentSpec):
        super().__init__(config, spec, config.num_atoms)
        # A resumed run may have other limits, so they are not saved.
        atoms = torch.linspace(config.v_min, config.v_max, config.num_atoms)
        self.register_buffer("atoms", atoms, persistent=False)

    def values(self, observation: Nest, action: torch.Tensor) -> torch.Tensor:
        """Expected returns `[N]` of actions `[N, D]` by the first critic, from which the policy learns."""
        return losses.expected_returns(self.critics(observation, action)[0], self.atoms)


class D4PG(TD3):
    """Deterministic policy gradients with a distributional critic and n-step targets."""

    config: D4PGConfig = D4PGConfig()

    def make_networks(self, spec: EnvironmentSpec) -> D4PGNetworks:
        members = ("actions", "policy", "critics", "values", "atoms")
        return self.custom_networks(spec, D4PGNetworks, members)

    def critic_losses(
        self, networks: TD3Networks, target: nn.Module, data: Transition, next_actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """As `TD3.critic_losses`. Priorities are the divergences of the targets."""
        atoms = networks.atoms
        assert isinstance(atoms, torch.Tensor)
        logits = networks.critics(data.observation, networks.actions.drawn(data)).float()
        with torch.no_grad():
            next_logits = target(data.next_observation, next_actions).float()
            least = losses.expected_returns(next_logits, atoms).argmin(0)
            following = next_logits[least, torch.arange(len(least), device=least.device)].softmax(-1)
            targets = losses.categorical_projection(atoms, following, *self.rewards(data))
        each, divergences = losses.categorical_cross_entropy(logits, targets.expand_as(logits))
        metrics = {
            "q_mean": losses.expected_returns(logits.detach(), atoms).mean(),
            "kl": divergences.mean(),
            "target_at_limits": (targets[:, 0] + targets[:, -1]).mean(),
        }
        return each.sum(0), divergences.mean(0), metrics


DM_CONTROL_RUN = {
    "num_actors": 1,
    "envs_per_actor": 4,
    "max_env_steps": 200_000,
    "evaluate_period": 20_000,
    "num_evaluation_episodes": 4,
}
_ACME = {
    "learning_rate": 3e-4,
    "critic_learning_rate": 3e-4,
    "exploration_std": 0.2,
    "hidden_sizes": (256, 256, 256),
}
PRESETS: Mapping[str, Preset] = {
    # A step costs up to 16.3, and one of a policy that does not swing up about 6.
    "gymnasium:Pendulum-v1": Preset(
        agent={
            **PENDULUM,
            "n_step": 1,
            "target_update_period": 1,
            "target_update_rate": 0.01,
            "learning_rate": 1e-3,
            "v_min": -800.0,
            "v_max": 0.0,
        },
        run=PENDULUM_RUN,
    ),
    # Rewards are between 0 and 1. A learner step for every 2 env steps, where Acme makes one for every 8.
    **dict.fromkeys(
        ("dm_control:cartpole/swingup", "dm_control:walker/walk"),
        Preset(
            agent={
                "batch_size": 128,
                "samples_per_insert": 64.0,
                "min_replay_size": 2_000,
                "learning_rate": 3e-4,
                "critic_learning_rate": 3e-4,
                "exploration_correlation": 0.85,
                "v_min": 0.0,
                "v_max": 100.0,
            },
            run=DM_CONTROL_RUN,
        ),
    ),
    "dm_control:*": Preset(_ACME, CONTROL_RUN, "Hoffman et al. (2020), run_d4pg.py of Acme"),
    MUJOCO: Preset(
        {**_ACME, "v_min": -1_000.0, "v_max": 1_000.0},
        CONTROL_RUN,
        "Hoffman et al. (2020), run_d4pg.py of Acme",
    ),
}
