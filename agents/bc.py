"""Behavioral cloning: the policy learns to act as the data does (Pomerleau, 1991).

Discrete actions follow the likelihood. Continuous ones follow the squared error of a deterministic policy, in
half-widths of their range, as the baseline of D4RL's tables does. With a memory, `recurrent`, an item is a
part of an episode, at whose first row the memory is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dm_env import specs as dm_specs
from torch import nn

from framework import adders, losses, networks
from framework import config_checks as check
from framework.adders import PriorityFn
from framework.learners import LossContext, LossOutput
from framework.networks import DeterministicHead, PolicyNetwork, RecurrentCore
from framework.replay import ReplaySample
from framework.replay.contracts import ReplayClient
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import OffPolicyAgent, OffPolicyConfig, TorchPolicy
from framework.types import Nest


@dataclass(frozen=True)
class BCConfig(OffPolicyConfig):
    """Settings of BC, in addition to `OffPolicyConfig`'s."""

    batch_size: int = 256  # Items per learner step.
    learning_rate: float = 3e-4  # Initial learning rate of Adam.
    hidden_sizes: tuple[int, ...] = (256, 256)  # Hidden layers of the policy.
    recurrent: str | None = None  # "lstm" or "gru" after the hidden layers. None: feed-forward.
    recurrent_size: int = 64  # Width of the recurrent layer.
    unroll_length: int = 64  # With it, rows of an item. More: a longer memory, and slower.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "hidden_sizes", "recurrent_size", "unroll_length")
        check.one_of(self, ("lstm", "gru"), "recurrent")
        # It learns from no reward, and has no targets.
        check.one_of(self, (1,), "n_step", "target_update_period")
        check.one_of(self, (OffPolicyConfig.target_update_rate,), "target_update_rate")
        if self.reward_clip is not None:
            check.refuse(self, "reward_clip", ", expected None: BC learns from no reward.")
        if self.recurrent is not None:
            check.one_of(self, (0,), "hindsight_goals")  # Goals are replaced in transitions only.


class RecurrentPolicy(PolicyNetwork):
    """A `PolicyNetwork` with a memory between the hidden layers and the head.

    Args:
      config: settings of the layers.
      spec: the spec of one env.
      make_head: as `PolicyNetwork`'s.
    """

    def __init__(self, config: BCConfig, spec: EnvironmentSpec, make_head: Callable[[int], nn.Module]):
        size = config.recurrent_size
        super().__init__(spec.observations, config.hidden_sizes, lambda width: make_head(size))
        self.core = RecurrentCore(self.body.output_size, size, config.recurrent or "lstm")

    def step(self, observation: Nest, state: Nest) -> tuple[Any, Nest]:
        """What the head makes of `[B, ...]`, and the next state."""
        features, state = self.core.step(self.body(self.encoder(observation)), state)
        return networks.masked_policy(self.head, features, observation), state

    def forward(self, observation: Nest) -> Any:
        """What the head makes of rows `[N, T, ...]`; the memory is empty before the first."""
        features = self.body(self.encoder(observation))
        features, _ = self.core.unroll(features, self.core.initial_state(len(features)))
        return networks.masked_policy(self.head, features, observation)


class BCNetworks(nn.Module):
    """The only variable of BC: `policy`."""

    def __init__(self, config: BCConfig, spec: EnvironmentSpec):
        super().__init__()
        self.actions: Any
        make_head: Any
        if isinstance(spec.actions, dm_specs.DiscreteArray):
            self.actions = networks.Actions(spec.actions)
            make_head = self.actions.make_head
        else:
            self.actions = networks.make_squashed_actions(spec.actions, "BC, or one discrete action")
            size = self.actions.head_spec.shape[0]
            make_head = lambda width: DeterministicHead(width, size)  # noqa: E731
        if config.recurrent is None:
            self.policy = PolicyNetwork(spec.observations, config.hidden_sizes, make_head)
        else:
            self.policy = RecurrentPolicy(config, spec, make_head)


class BCPolicy(TorchPolicy):
    """The most likely action.

    Args:
      networks: the networks, which the policy reads at each step.
      recurrent: whether they have a memory.
    """

    def __init__(self, networks: BCNetworks, recurrent: bool = False):
        super().__init__(networks, networks.actions, variables=("policy",))
        self._policy: Any = networks.policy
        self._recurrent = recurrent

    def initial_state(self, batch_size: int) -> Nest:
        """The memory's state `[B, ...]`; `()` without a memory."""
        return self._policy.core.initial_state(batch_size) if self._recurrent else ()

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        if self._recurrent:
            chosen, state = self._policy.step(observation, state)
        else:
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
        return BCPolicy(networks, self.config.recurrent is not None)

    def env_steps_per_item(self) -> int:
        return 1 if self.config.recurrent is None else self.config.unroll_length

    def make_adder(
        self, client: ReplayClient, spec: EnvironmentSpec, priority_fn: PriorityFn | None = None
    ) -> adders.Adder:
        config = self.config
        if config.recurrent is None:
            return super().make_adder(client, spec, priority_fn)
        return adders.SequenceAdder(
            client,
            sequence_length=config.unroll_length,
            period=config.unroll_length,
            priority_fns={self.items_table: priority_fn},
            max_in_flight_items=config.insert_burst,
            observation_spec=spec.observations,
        )

    def loss(self, networks: BCNetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The mean of `-log pi(a | s)`, or of the squared error, over `Transition`s or rows of `Step`s."""
        data, mask, count = batch.data, None, None
        if self.config.recurrent is not None:
            mask, count = data.mask, data.mask.sum()
            data = data._replace(observation=adders.restacked(data.observation, mask.shape[1]))
        chosen, actions = networks.policy(data.observation), networks.actions.drawn(data)
        if networks.actions.continuous:
            loss = losses.masked_mean((chosen - actions).square().mean(-1), mask)
            return LossOutput(loss, {"error": loss}, None, count)
        loss = losses.masked_mean(-chosen.log_prob(actions), mask)
        agrees = losses.masked_mean((chosen.mode() == actions).float(), mask)
        return LossOutput(loss, {"negative_log_likelihood": loss, "agreement": agrees}, None, count)


PRESETS: Mapping[str, Preset] = {
    # 500, greedy over 100 episodes, at 20,000 learner steps on data of 269.6, seeds 1 to 3.
    "gymnasium:CartPole-v1": Preset({"batch_size": 128, "hidden_sizes": (64, 64), "learning_rate": 1e-3}),
}
