"""Behavioral cloning: the policy learns to act as the data does (Pomerleau, 1991).

Discrete actions follow the likelihood. Continuous ones follow the squared error of a deterministic policy, in
half-widths of their range, as the baseline of D4RL's tables does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from dm_env import specs as dm_specs
from torch import nn

from framework import config_checks as check
from framework import networks
from framework.learners import LossContext, LossOutput
from framework.networks import DeterministicHead, PolicyNetwork
from framework.replay import ReplaySample
from framework.specs import EnvironmentSpec
from framework.torch_agents import OffPolicyAgent, OffPolicyConfig, TorchPolicy
from framework.types import Nest


@dataclass(frozen=True)
class BCConfig(OffPolicyConfig):
    """Settings of BC, in addition to `OffPolicyConfig`'s."""

    batch_size: int = 256  # Items per learner step.
    learning_rate: float = 3e-4  # Initial learning rate of Adam.
    hidden_sizes: tuple[int, ...] = (256, 256)  # Hidden layers of the policy.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "hidden_sizes")


class BCNetworks(nn.Module):
    """The only variable of BC: `policy`."""

    def __init__(self, config: BCConfig, spec: EnvironmentSpec):
        super().__init__()
        self.actions: Any
        if isinstance(spec.actions, dm_specs.DiscreteArray):
            self.actions, make_head = networks.Actions(spec.actions), None
        else:
            self.actions = networks.make_squashed_actions(spec.actions, "BC, or one discrete action")
            size = self.actions.head_spec.shape[0]
            make_head = lambda width: DeterministicHead(width, size)  # noqa: E731
        self.policy = PolicyNetwork(
            spec.observations, config.hidden_sizes, make_head or self.actions.make_head
        )


class BCPolicy(TorchPolicy):
    """The most likely action.

    Args:
      networks: the networks, which the policy reads at each step.
    """

    def __init__(self, networks: BCNetworks):
        super().__init__(networks, networks.actions, variables=("policy",))
        self._policy = networks.policy

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        chosen = self._policy(observation)
        return chosen if self.actions.continuous else chosen.mode(), (), state


class BC(OffPolicyAgent):
    """Behavioral cloning.

    ```python
    config = programs.RunConfig(dataset="data/cartpole", max_learner_steps=20_000)
    program = programs.make_program(BC(), "gymnasium:CartPole-v1", config)
    ```
    """

    config: BCConfig = BCConfig()
    takes_action_masks = True

    def make_networks(self, spec: EnvironmentSpec) -> BCNetworks:
        return self.custom_networks(spec, BCNetworks, ("actions", "policy"))

    def make_policy(self, networks: BCNetworks, evaluation: bool = False) -> BCPolicy:
        return BCPolicy(networks)

    def loss(self, networks: BCNetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The mean of `-log pi(a | s)`, or of the squared error, on a batch of `Transition`s."""
        chosen, actions = networks.policy(batch.data.observation), networks.actions.drawn(batch.data)
        if networks.actions.continuous:
            loss = (chosen - actions).square().mean()
            return LossOutput(loss, {"error": loss})
        loss = -chosen.log_prob(actions).mean()
        agrees = (chosen.mode() == actions).float().mean()
        return LossOutput(loss, {"negative_log_likelihood": loss, "agreement": agrees})
