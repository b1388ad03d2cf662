"""DQfD: deep Q-learning from demonstrations (Hester et al., 2018).

This is DQN whose batches hold a fixed share of a demonstrator's transitions, as in R2D3 (Gulcehre et al.,
2020). The learner first learns from demonstrations alone. A margin loss makes the demonstrated actions the
best ones.

Demonstrations have a table of their own, which the learner fills once and from which nothing is removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tree
from torch import nn

from agents.dqn import DQN, DQNConfig, DQNNetworks, ItemLosses
from framework import adders, environments, losses, replay
from framework import config_checks as check
from framework.adders import PriorityFn
from framework.datasets import DEMONSTRATIONS_TABLE, Dataset, record, table_numbers
from framework.learners import LossContext, LossOutput
from framework.networks import mask_values
from framework.replay.contracts import ReplayClient
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec, frame_stack
from framework.types import Step, Transition


@dataclass(frozen=True)
class DQfDConfig(DQNConfig):
    """Settings of DQfD, in addition to `DQNConfig`'s.

    Exploration, priorities, the margin and the weights of the losses are the paper's.
    """

    demonstration_fraction: float = 0.25  # Share of demonstrations in a batch. Larger shares imitate longer.
    # Added to the priority of a demonstration. Larger values draw demonstrations more evenly.
    demonstration_priority: float = 1.0
    pretraining_steps: int = 1_000  # Learner steps on demonstrations alone, at the start.
    margin: float = 0.8  # By which the value of a demonstrated action should exceed the others'.
    margin_coefficient: float = 1.0  # Weight of the margin loss of demonstrations.
    n_step_coefficient: float = 1.0  # Weight of the n-step loss; the 1-step loss has 1.
    l2_coefficient: float = 1e-5  # Weight of the sum of the squares of all parameters.

    n_step: int = 10  # Rewards summed before bootstrapping, in the n-step loss.
    min_replay_size: int = 1  # Items of actors in replay before learning from them begins.
    # Times an item of the actors is drawn on average. Divided by `(1 - demonstration_fraction) * batch_size`:
    # learner steps per item.
    samples_per_insert: float = 16.0
    prioritized: bool = True  # Draws items with large errors more often.
    priority_exponent: float = 0.4  # 0 draws uniformly, 1 proportionally to the error.
    importance_sampling_exponent: float = 0.6  # Initial exponent of the importance weights.
    epsilon_start: float | None = 0.01  # Chance of a random action before learning begins.
    epsilon_end: float | None = 0.01  # Chance of a random action after the decay.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "demonstration_priority", "pretraining_steps", "margin", "margin_coefficient")
        check.at_least(self, 0, "n_step_coefficient", "l2_coefficient")
        check.one_of(self, (0,), "hindsight_goals")  # The goals of demonstrations are their own.


class DQfD(DQN):
    """Deep Q-learning from demonstrations and from what the actors do."""

    config: DQfDConfig = DQfDConfig()
    needs_demonstrations = True

    def make_adder(
        self, client: ReplayClient, spec: EnvironmentSpec, priority_fn: PriorityFn | None = None
    ) -> adders.Adder:
        return adders.NStepTransitionAdder(
            client,
            self.config.n_step,
            self.config.discount,
            priority_fns={self.items_table: priority_fn},
            max_in_flight_items=self.config.insert_burst,
            frame_stack=frame_stack(spec.observations),
            one_step=True,
            reward_clip=self.config.reward_clip,
        )

    def make_dataset(self, client: ReplayClient, **options: Any) -> Dataset:
        config = self.config
        table = client.server_info()[DEMONSTRATIONS_TABLE]
        # Both tables are saved with the run, and the number of samples.
        steps = table.rate_limiter_info.sample_stats.completed // config.batch_size
        return super().make_dataset(client, only_first=max(0, config.pretraining_steps - steps), **options)

    def item_losses(
        self, networks: DQNNetworks, target: nn.Module, data: Transition, context: LossContext | None = None
    ) -> ItemLosses:
        """The losses of `Transition`s whose extras are a `OneStep` and bool[N], which are demonstrations."""
        config, (first, demonstrated) = self.config, data.extras
        long = data._replace(extras=())
        short = long._replace(
            reward=first.reward, discount=first.discount, next_observation=first.next_observation
        )
        both = tree.map_structure(lambda *leaves: torch.cat(leaves), short, long)
        each, errors, metrics = super().item_losses(networks, target, both, context)
        (one_step, n_step), (_, errors) = each.chunk(2), errors.chunk(2)
        values = mask_values(networks.values(data.observation), data.observation)
        margins = losses.large_margin_loss(values, data.action, config.margin)
        margins = demonstrated * margins
        metrics["margin_loss"] = margins.sum() / demonstrated.sum().clamp(min=1)
        metrics["demonstration_fraction"] = demonstrated.float().mean()
        # Other items have a priority of at least 0.001, as in the paper.
        priorities = errors + torch.where(demonstrated, config.demonstration_priority, 0.001)
        each = one_step + config.n_step_coefficient * n_step + config.margin_coefficient * margins
        return each, priorities, metrics

    def loss(self, networks: DQNNetworks, batch: replay.ReplaySample, context: LossContext) -> LossOutput:
        """The mean of `item_losses`, as DQN's, and the squares of the parameters."""
        data = batch.data
        demonstrated = torch.as_tensor(table_numbers(batch.info.key) == 0, device=data.reward.device)
        data = data._replace(extras=(data.extras, demonstrated))
        output = super().loss(networks, batch._replace(data=data), context)
        squares = torch.stack([parameter.square().sum() for parameter in networks.parameters()]).sum()
        return output._replace(loss=output.loss + self.config.l2_coefficient * squares)


def mountain_car(count: int = 5, seed: int = 0) -> Iterator[Step]:
    """Episodes of `gymnasium:MountainCar-v0` that push in the direction of the velocity."""
    environment = environments.make("gymnasium:MountainCar-v0", num_envs=1, seed=seed)
    yield from record(
        environment, lambda observation: np.where(observation[:, 1] < 0, 0, 2).astype(np.int64), count
    )
    environment.close()


PRESETS: Mapping[str, Preset] = {
    "gymnasium:MountainCar-v0": Preset(
        agent={"demonstrations": "agents.dqfd:mountain_car", "learning_rate_decay": 60_000},
        run={"num_actors": 1, "envs_per_actor": 4, "max_env_steps": 60_000, "evaluate_period": 10_000},
    ),
}
