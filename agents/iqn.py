"""IQN: Q-learning of quantiles of the return at random fractions (Dabney et al., 2018b).

The network gives the quantile of the return of each action at any fraction tau. Each item of a batch draws
its own fractions, and the loss is quantile regression with the Huber loss, whose threshold kappa is
`huber_delta`. Everything else is as in DQN: double Q-learning, n-step targets, prioritized replay, dueling
and noisy networks and Munchausen's rewards are fields of the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agents import dqn
from agents.dqn import DQNConfig, DQNNetworks, ItemLosses
from agents.qr_dqn import QuantileDQN, QuantileNetworks
from framework import config_checks as check
from framework import networks
from framework.learners import LossContext
from framework.runs.presets import ATARI_RUN, Preset
from framework.specs import EnvironmentSpec
from framework.types import Transition


@dataclass(frozen=True)
class IQNConfig(DQNConfig):
    """Settings of IQN, in addition to `DQNConfig`'s."""

    huber_delta: float = 1.0  # The paper's kappa: errors of quantiles beyond this count linearly.
    num_quantiles: int = 8  # Random fractions per item at which quantiles are learned; the paper's N.
    num_target_quantiles: int = 8  # Fractions drawn for each item's target; the paper's N'.
    num_policy_quantiles: int = 32  # Evenly spaced fractions whose mean is an action's value; the paper's K.
    num_cosines: int = 64  # Cosines of a fraction that the network gets. More: finer distributions.
    risk: float = 1.0  # A value is the mean of this share of the lowest returns (CVaR). 1: of all returns.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "num_quantiles", "num_target_quantiles", "num_cosines")
        check.at_least(self, 2, "num_policy_quantiles")
        check.above(self, 0, "risk")
        check.fraction(self, "risk")


class IQNNetworks(QuantileNetworks):
    """DQN's networks, with quantiles `[N, A, K]` of the return of each action, at any fractions `[N, K]`."""

    def __init__(self, config: IQNConfig, spec: EnvironmentSpec):
        super().__init__(config, spec, config.num_policy_quantiles)
        count = config.num_policy_quantiles
        fractions = [config.risk * (k + 0.5) / count for k in range(count)]
        names = ("hidden_sizes", "dueling", "layer_norm", "num_cosines", "torso", "torso_size")
        settings: dict[str, Any] = {name: getattr(config, name) for name in names}
        settings["noise"] = config.initial_noise if config.noisy else 0.0
        self.q_network = networks.ImplicitQuantileNetwork(
            spec.observations, self.num_actions, fractions, **settings
        )


def stratified(items: torch.Tensor, count: int, context: LossContext | None) -> torch.Tensor:
    """Random fractions `[N, count]` for N items: one in each of `count` equal parts of the unit interval."""
    drawn = torch.empty((len(items), count), device=items.device)
    drawn = drawn.uniform_() if context is None else context.uniform_like(drawn)
    return (torch.arange(count, device=items.device) + drawn) / count


class IQN(QuantileDQN):
    """Distributional Q-learning with implicit quantiles, for one discrete action per env."""

    config: IQNConfig = IQNConfig()
    networks_class = IQNNetworks

    def item_losses(
        self, networks: DQNNetworks, target: nn.Module, data: Transition, context: LossContext | None = None
    ) -> ItemLosses:
        """As `DQN.item_losses`. Priorities are the losses."""
        config, items = self.config, data.reward
        fractions = stratified(items, config.num_quantiles, context)
        target_fractions = stratified(items, config.num_target_quantiles, context)
        targets = self.target_samples(networks, target, data, target_fractions)
        outputs = networks.q_network(data.observation, fractions)
        return self.quantile_losses(outputs, data, fractions, targets)


PRESETS: Mapping[str, Preset] = {
    # One stream and half as many learner steps leave some seeds at 200 to 400.
    "gymnasium:CartPole-v1": Preset(
        {**dqn.CARTPOLE, "dueling": True, "samples_per_insert": 48.0, "num_policy_quantiles": 8},
        dqn.CARTPOLE_RUN,
    ),
    **dict.fromkeys(
        ("minatar:Breakout", "minatar:*"),
        Preset(
            {**dqn.MINATAR, "hidden_sizes": (128,), "num_policy_quantiles": 8},
            dqn.MINATAR_RUN,
            sources=dqn.YOUNG,
        ),
    ),
    "atari:*": Preset(
        {**dqn.ATARI_2017, "learning_rate": 5e-5, "num_quantiles": 64, "num_target_quantiles": 64},
        dqn.ATARI_2017_RUN,
        "Dabney et al. (2018b), implicit_quantile_icml.gin of Dopamine 2",
        dqn.OURS,
    ),
    "beyond_the_rainbow": Preset(
        {
            **dqn.ATARI,
            "n_step": 3,
            "discount": 0.997,
            "batch_size": 256,
            "samples_per_insert": 4.0,  # A learner step for every 64 env steps.
            "insert_burst": 256,
            "min_replay_size": 200_000,
            "max_replay_size": 1_048_576,
            "prioritized": True,
            "priority_exponent": 0.2,
            "importance_sampling_exponent": 0.2,
            "importance_sampling_annealing": 10**12,  # It stays.
            "learning_rate": 1e-4,
            "adam_epsilon": 0.005 / 256,
            "max_gradient_norm": 10.0,
            "target_update_period": 500,
            "munchausen": 0.9,
            "num_policy_quantiles": 8,
            "epsilon_start": 1.0,
            "epsilon_decay": 2_000_000,
            "evaluation_epsilon": 0.01,
            "torso": "spectral",
            "dueling": True,
            "noisy": True,
        },
        {**ATARI_RUN, **dqn.DQN_RUN, "envs_per_actor": 64},
        "Clark et al. (2024), the authors' code of 2025",
        dqn.OURS,
    ),
}
