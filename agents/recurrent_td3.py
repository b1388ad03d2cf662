"""Recurrent TD3: TD3 with a memory, from replayed sequences (after the R2D1 of Stooke and Abbeel, 2019).

An encoder with an LSTM makes features of the observations so far. Policy and critics are TD3's, and see the
features in place of the observation. The memory learns from the critics' loss only, as the encoder of Yarats
et al. (2021) does. Actors therefore know its state and store it with each sequence, whose rows belong to
R2D2: `burn_in` rows that bring the stored state up to date, `unroll_length` rows that are learned from, and
one to bootstrap from. Sequences go on over the ends of episodes, where the state restarts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dm_env import specs as dm_specs

from agents.r2d2 import SequenceConfig, sequence_adder, unroll_inputs
from agents.td3 import TD3, TD3Config, TD3Networks, TD3Policy
from framework import adders, losses, networks, replay
from framework import config_checks as check
from framework.adders import PriorityFn
from framework.learners import LossContext, LossOutput
from framework.losses.masking import where_counted
from framework.networks import frozen
from framework.replay.contracts import ReplayClient
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import previous_action_and_reward
from framework.types import Nest


@dataclass(frozen=True)
class RecurrentTD3Config(TD3Config, SequenceConfig):
    """Settings of recurrent TD3, in addition to `TD3Config`'s and `SequenceConfig`'s."""

    unroll_length: int = 20  # Rows of a sequence that are learned from.
    burn_in: int = 10  # Rows before them, which only bring the stored state up to date.
    period: int = 10  # Env steps from the start of one sequence to the start of the next.
    max_replay_size: int = 100_000  # Maximum number of sequences; the oldest are removed first.
    min_replay_size: int = 100  # Sequences in replay before learning begins.
    batch_size: int = 32  # Sequences per learner step.
    samples_per_insert: float = 64.0  # Times a sequence is drawn on average.
    # Sequences by which inserts may lead or trail the ratio; also the limit in flight.
    insert_burst: int = 16
    encoder_sizes: tuple[int, ...] = (64,)  # Layers before the LSTM for observations without images.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "encoder_sizes")


class RecurrentTD3Networks(TD3Networks):
    """The variables of recurrent TD3: `memory`, and `policy` and `critics`, which take its features."""

    def __init__(self, config: RecurrentTD3Config, spec: EnvironmentSpec):
        memory = networks.RecurrentEncoder(spec.observations, config.encoder_sizes, config.lstm_size)
        features = dm_specs.Array((memory.output_size,), "float32")
        super().__init__(config, spec._replace(observations=features))
        self.memory = memory


class RecurrentTD3Policy(TD3Policy):
    """`TD3Policy` with a memory, whose state before each step is in the extras, as `state`."""

    def __init__(self, networks: RecurrentTD3Networks, config: RecurrentTD3Config, evaluation: bool = False):
        super().__init__(networks, config, evaluation)
        self.variables = ("memory", *self.variables)
        self._memory = networks.memory

    def initial_state(self, batch_size: int) -> Nest:
        """The state of the noise, and the state of the memory."""
        return super().initial_state(batch_size), self._memory.initial_state(batch_size)

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        noise, before = state
        features, after = self._memory.step(observation, before)
        action, _, noise = self.explore(self._policy(features), noise)
        return action, {"state": before} if before else (), (noise, after)


class RecurrentTD3(TD3):
    """TD3 with a memory.

    ```python
    agent = RecurrentTD3(RecurrentTD3Config(lstm_size=64, burn_in=10))
    program = programs.make_program(agent, "testing:PendulumWithoutVelocity", programs.RunConfig())
    ```
    """

    config: RecurrentTD3Config = RecurrentTD3Config()
    memory_field = "lstm_size"
    target_names = ("memory", "policy", "critics")
    learning_rates = {**TD3.learning_rates, "memory": "critic_learning_rate"}

    def environment_wrappers(self) -> Sequence[Any]:
        """Adds the last action and reward to the observation with `previous_action_and_reward`."""
        return previous_action_and_reward(self.config)

    def env_steps_per_item(self) -> int:
        return self.config.period

    def make_networks(self, spec: EnvironmentSpec) -> RecurrentTD3Networks:
        memory = ("memory.initial_state", "memory.step", "memory.unroll")
        members = ("actions", "policy", "critics", "values", *memory)
        return self.custom_networks(spec, RecurrentTD3Networks, members)

    def make_policy(self, networks: Any, evaluation: bool = False) -> RecurrentTD3Policy:
        return RecurrentTD3Policy(networks, self.config, evaluation)

    def make_adder(
        self, client: ReplayClient, spec: EnvironmentSpec, priority_fn: PriorityFn | None = None
    ) -> adders.Adder:
        return sequence_adder(self, client, spec, priority_fn)

    def loss(self, networks: Any, batch: replay.ReplaySample, context: LossContext) -> LossOutput:
        """The sum of both losses on a batch of `Step`s `[N, burn_in + unroll_length + 1, ...]`."""
        config, data, start = self.config, batch.data, self.config.burn_in
        inputs = unroll_inputs(self, data)
        mask = data.mask[:, start:]
        counted = losses.transition_mask(mask)
        features = networks.memory.unroll(*inputs)
        values = networks.critics(features, networks.actions.drawn(data)[:, start:]).float()
        target: Any = context.targets["memory"]
        with torch.no_grad():
            rated = target.unroll(*inputs)
            next_values = context.targets["critics"](rated, self.next_actions(rated, context)).float()
            rewards, discounts = (each[:, start:] for each in self.rewards(data))
            rewards = losses.clipped_rewards(rewards, config.reward_clip)
            targets = losses.n_step_returns(rewards, discounts, next_values.amin(0), mask, config.n_step)
        errors = where_counted(targets - values, counted)
        each, total, priorities = 0.5 * errors.square().sum(0), counted.sum(), None
        metrics = {
            "q_mean": losses.masked_mean(values.mean(0), counted),
            "q_spread": losses.masked_mean(values.std(0, correction=0), counted),
            "transitions": total,
        }
        if config.prioritized:
            weights = context.importance_weights(batch.info, config.importance_sampling_exponent)
            each = weights.unsqueeze(1) * each
            sizes = losses.sequence_priorities(errors.abs().mean(0), counted, config.priority_eta)
            priorities = losses.item_priorities(sizes)
            metrics["importance_weight"] = weights.mean()
        critic = metrics["critic_loss"] = each.sum() / total.clamp(min=1)
        if not context.is_due(config.actor_delay):
            return LossOutput(critic, metrics, priorities, total)
        features = features.detach()
        actions = networks.policy(features)
        with frozen(networks.critics):
            actor = losses.deterministic_policy_loss(networks.values(features, actions), counted)
        saturated = (actions.abs() > 0.99).float().mean(-1)
        metrics["actor_loss"], metrics["saturation"] = actor, losses.masked_mean(saturated, counted)
        return LossOutput(critic + actor, metrics, priorities, total)


PRESETS: Mapping[str, Preset] = {
    # Chosen on seeds 101 and 102. Without layer norm, the policy follows the first values to a bound of the
    # actions and stays there. With n_step=3, seed 101 ended at -530 instead of -150.
    "testing:PendulumWithoutVelocity": Preset(
        agent={
            "learning_rate": 3e-4,
            "learning_rate_decay": 30_000,
            "layer_norm": True,
            "unroll_length": 10,
            "burn_in": 5,
            "period": 5,
            "samples_per_insert": 128.0,
            "target_update_rate": 0.01,
            "hidden_sizes": (64,),
            "lstm_size": 64,  # None, a network without memory, does not swing up.
        },
        run={"num_actors": 1, "envs_per_actor": 1, "max_env_steps": 30_000, "evaluate_period": 5_000},
    ),
}
