"""C51: Q-learning of the distribution of the return on fixed atoms (Bellemare et al., 2017).

The network gives the probability of each of K returns between `v_min` and `v_max`, for each action. The
target is the distribution of reward and next state's return, projected on these returns, and the loss is the
cross entropy. Everything else is as in DQN: double Q-learning, n-step targets, prioritized replay, dueling
and noisy networks are fields of the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from agents import dqn
from agents.dqn import DQN, DQNConfig, DQNNetworks, ItemLosses
from framework import config_checks as check
from framework import losses
from framework.learners import LossContext
from framework.networks import mask_values
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.types import Transition


@dataclass(frozen=True)
class C51Config(DQNConfig):
    """Settings of C51, in addition to `DQNConfig`'s."""

    num_atoms: int = 51  # K, the possible returns. 1 learns expected returns by Huber's loss, as DQN.
    v_min: float = -10.0  # Smallest return that can be represented. Smaller ones count as this.
    v_max: float = 10.0  # Largest return that can be represented. Larger ones count as this.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "num_atoms")
        check.return_limits(self)
        for field in ("huber_delta", "munchausen"):
            value, default = getattr(self, field), getattr(DQNConfig, field)
            if self.num_atoms > 1 and value != default:
                raise ValueError(
                    f"{field}: got {value!r}, expected {default!r}. The loss of C51 is a cross entropy; with "
                    "num_atoms=1 it is DQN's loss, which has this setting."
                )


class C51Networks(DQNNetworks):
    """The networks of DQN, with a distribution `[N, A, K]` of the return of each action.

    Attributes:
      atoms: `[K]` possible returns.
    """

    atoms: torch.Tensor

    def __init__(self, config: C51Config, spec: EnvironmentSpec):
        super().__init__(config, spec, config.num_atoms)
        # A resumed run may have other limits, so they are not saved.
        atoms = torch.linspace(config.v_min, config.v_max, config.num_atoms)
        self.register_buffer("atoms", atoms, persistent=False)

    def expected(self, outputs: torch.Tensor) -> torch.Tensor:
        if len(self.atoms) == 1:
            return outputs
        return losses.expected_returns(outputs, self.atoms)


class C51(DQN):
    """Distributional Q-learning on fixed atoms, for one discrete action per env."""

    config: C51Config = C51Config()
    networks_class = C51Networks
    members = (*DQN.members, "expected", "atoms")

    def item_losses(
        self, networks: DQNNetworks, target: nn.Module, data: Transition, context: LossContext | None = None
    ) -> ItemLosses:
        """As `DQN.item_losses`. Priorities are the divergences of the target, as in Rainbow."""
        if self.config.num_atoms == 1:
            return super().item_losses(networks, target, data, context)
        assert isinstance(networks.atoms, torch.Tensor)
        rewards, discounts = self.rewards(data)
        outputs = networks.q_network(data.observation).float()
        with torch.no_grad():
            next_outputs = target(data.next_observation).float()
            selector = (
                networks.values(data.next_observation)
                if self.config.double
                else networks.expected(next_outputs)
            )
            best = mask_values(selector, data.next_observation).argmax(-1)
            following = losses.of_actions(next_outputs, best).softmax(-1)
            targets = losses.categorical_projection(networks.atoms, following, rewards, discounts)
        taken = losses.of_actions(outputs, data.action)
        each, divergences = losses.categorical_cross_entropy(taken, targets)
        metrics = {
            "q_mean": networks.expected(outputs.detach()).mean(),
            "kl": divergences.mean(),
            "target_at_limits": (targets[:, 0] + targets[:, -1]).mean(),
        }
        return each, divergences, metrics


PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": Preset({**dqn.CARTPOLE, "v_min": 0.0, "v_max": 100.0}, dqn.CARTPOLE_RUN),
    # A good player hits a brick about every ten steps: a discounted return of 10.
    "minatar:Breakout": Preset(
        {**dqn.MINATAR, "v_min": 0.0, "v_max": 20.0, "hidden_sizes": (128,), "dueling": True}, dqn.MINATAR_RUN
    ),
    # A good player of Space Invaders hits an alien every four steps: a discounted return of 25.
    "minatar:*": Preset(
        {**dqn.MINATAR, "v_min": 0.0, "v_max": 50.0, "hidden_sizes": (128,), "dueling": True},
        dqn.MINATAR_RUN,
        sources=dqn.YOUNG,
    ),
    "atari:*": Preset(
        {**dqn.ATARI_2017, "learning_rate": 2.5e-4},
        dqn.ATARI_2017_RUN,
        "Bellemare et al. (2017), c51_icml.gin of Dopamine 2",
        dqn.OURS,
    ),
}
