"""ReBRAC (Tarasov et al., 2023): TD3+BC that also keeps to the data in the critics' targets.

The squared distance to the data's actions has one weight in the policy's loss, and another in the targets,
where it is the distance of the target policy's next action to the data's next action. An item is therefore a
row and the one after it. The last row of an episode has no action, and nothing is taken off its value.
Critics have three normalized layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tree

from agents.td3 import PENDULUM, PENDULUM_RUN, TD3, TD3Config, TD3Networks
from framework import adders
from framework import config_checks as check
from framework.adders import PriorityFn
from framework.learners import LossContext, LossOutput
from framework.losses.masking import where_counted
from framework.networks import frozen
from framework.replay import ReplaySample
from framework.replay.contracts import ReplayClient
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec
from framework.types import Transition


@dataclass(frozen=True)
class ReBRACConfig(TD3Config):
    """Settings of ReBRAC: TD3's, with the paper's defaults for MuJoCo, and the two weights."""

    batch_size: int = 1024  # Items per learner step.
    samples_per_insert: float = 1024.0  # Draws of an item. Divided by batch_size: learner steps per item.
    actor_penalty: float = 0.01  # Weight of the squared distance in the policy's loss: 0.0005 to 1.
    critic_penalty: float = 0.01  # Weight of the squared distance in the critics' targets: 0 to 0.5.
    hidden_sizes: tuple[int, ...] = (256, 256, 256)  # Hidden layers of the policy and of each critic.
    layer_norm: bool = True  # Normalizes the hidden layers of the critics, not the policy's.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "actor_penalty", "critic_penalty")
        check.one_of(self, (0,), "hindsight_goals")  # Goals are replaced in transitions only.
        if self.n_step > 1:
            check.refuse(self, "n_step", ", expected 1: the data's next action is one step later.")
        if self.prioritized:
            check.refuse(self, "prioritized", ", expected False: all of the data counts alike.")


class ReBRACNetworks(TD3Networks):
    """TD3's networks, of which `layer_norm` is for the critics only."""

    normalizes_policy = False


class ReBRAC(TD3):
    """TD3 near the data's actions, in the policy and in the targets.

    ```python
    config = programs.RunConfig(dataset="data/hopper-medium", max_learner_steps=200_000)
    program = programs.make_program(ReBRAC(), "gymnasium:Hopper-v5", config)
    ```
    """

    config: ReBRACConfig = ReBRACConfig()

    def make_networks(self, spec: EnvironmentSpec) -> TD3Networks:
        return self.custom_networks(spec, ReBRACNetworks, ("actions", "policy", "critics", "values"))

    def make_adder(
        self, client: ReplayClient, spec: EnvironmentSpec, priority_fn: PriorityFn | None = None
    ) -> adders.Adder:
        return adders.SequenceAdder(
            client,
            sequence_length=2,
            period=1,
            priority_fns={self.items_table: priority_fn},
            max_in_flight_items=self.config.insert_burst,
        )

    def loss(self, networks: TD3Networks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The sum of both losses on a batch of `Step`s `[N, 2, ...]`.

        ```text
        critics  1/2 sum_i (r + g (min_j q'_j(s', b) - critic_penalty |b - a'|^2) - q_i(s, a))^2
        policy   actor_penalty |pi(s) - a|^2 - min_i q_i(s, pi(s)) / mean |min_i q_i|
        ```
        """
        config, rows = self.config, batch.data
        first, after = (tree.map_structure(lambda leaf, t=t: leaf[:, t], rows) for t in (0, 1))
        actions, next_actions = networks.actions.drawn(rows).unbind(1)
        reward = first.reward.float()
        if config.reward_clip is not None:
            reward = reward.clamp(-config.reward_clip, config.reward_clip)
        chosen = self.next_actions(after.observation, context)
        # The closing row has no action.
        distance = where_counted((chosen - next_actions).square().sum(-1), after.mask)
        penalty = config.discount * config.critic_penalty * first.discount * distance
        data = Transition(
            first.observation, first.action, reward - penalty, first.discount, after.observation
        )
        each, _, metrics = self.critic_losses(networks, context.targets["critics"], data, chosen)
        critic = metrics["critic_loss"] = each.mean()
        metrics["next_distance"] = distance.mean()
        if not context.is_due(config.actor_delay):
            return LossOutput(critic, metrics)
        own = networks.policy(data.observation)
        with frozen(networks.critics):
            values = networks.critics(data.observation, own).amin(0)
        scale = values.detach().abs().mean().clamp(min=1e-6)
        error = metrics["clone_error"] = (own - actions).square().sum(-1).mean()
        actor = metrics["actor_loss"] = config.actor_penalty * error - values.mean() / scale
        return LossOutput(critic + actor, metrics)


PRESETS: Mapping[str, Preset] = {
    # -132.0, greedy over 100 episodes, the best of 20,000 learner steps on data of -585.9, seed 1.
    "gymnasium:Pendulum-v1": Preset(
        {**PENDULUM, "batch_size": 256, "hidden_sizes": (64, 64, 64)}, PENDULUM_RUN
    ),
}
