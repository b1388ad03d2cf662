"""APPO: IMPALA with PPO's clipped surrogate and a target network (Luo et al., 2020; Liang et al., 2021).

Actors and learner work as in `agents.impala`: the actors run ahead, and the learner takes batches of unrolls
from replay. The surrogate compares the learner's policy with a target network's, a copy of the networks
that changes rarely, and not with the policies of the actors, which are of different ages. V-trace weights the
actions of the actors' policy by their probability under the target network's policy.

With `samples_per_insert` above 1, replay is IMPACT's buffer with bounded reuse: each unroll is drawn that
often, at random among those that wait, and then leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agents.impala import IMPALA, RUN, IMPALAConfig, IMPALANetworks
from agents.impala import PRESETS as IMPALA_PRESETS
from framework import adders, losses, replay
from framework import config_checks as check
from framework.learners import LossContext, LossOutput
from framework.replay import ReplaySample
from framework.runs.presets import ATARI_RUN, HERE, Preset
from framework.specs import EnvironmentSpec


@dataclass(frozen=True)
class APPOConfig(IMPALAConfig):
    """Settings of APPO and IMPACT, in addition to `IMPALAConfig`'s."""

    # Replay.
    samples_per_insert: int = 1  # K, times each unroll is learned from. 1: a queue, oldest first.

    # Objective.
    clip: float = 0.3  # Ratios of the policy to the target network's are clipped to 1 +- this.
    clip_target: float = 2.0  # Bound of the ratio of the actors' policy to the target network's.
    target_update_period: int = 8  # Learner steps between copies to the target network.

    optimizer: str = "adam"  # "rmsprop" or "adam".

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "samples_per_insert", "target_update_period")
        check.above(self, 0, "clip_target")
        check.between(self, 0, 1, "clip")


class APPO(IMPALA):
    """Asynchronous PPO with a target network, for discrete and continuous actions, and nests of them.

    ```python
    agent = APPO(APPOConfig(clip=0.2))
    config = programs.RunConfig(num_actors=2, envs_per_actor=8)
    program = programs.make_program(agent, environment_factory, config)
    ```
    """

    config: APPOConfig = APPOConfig()

    def optimizer_steps(self, env_steps: int) -> float:
        return super().optimizer_steps(env_steps) * self.config.samples_per_insert

    def make_tables(self, spec: EnvironmentSpec) -> list[replay.Table]:
        """IMPALA's queue, or a buffer of unrolls that are drawn `samples_per_insert` times each.

        Actors wait while the buffer is full, so no unroll is lost before it was drawn that often. A learner
        that is faster than the actors waits, too: if it emptied the buffer, it would draw the same few
        unrolls several times in one batch.
        """
        uses = self.config.samples_per_insert
        if uses == 1:
            return super().make_tables(spec)
        turns = uses * self.items_per_step  # one for each batch of new unrolls
        size, kept = self.queue_batches * turns, (self.queue_batches - 1) * turns / 2
        limiter = replay.rate_limiters.RateLimiter(uses, min_size_to_sample=1, min_diff=kept, max_diff=size)
        sampler, remover = replay.selectors.Uniform(), replay.selectors.Fifo()
        return [replay.Table(adders.QUEUE_TABLE, sampler, remover, size, limiter, max_times_sampled=uses)]

    def learner_settings(self, networks: nn.Module) -> dict[str, Any]:
        period = self.config.target_update_period
        return super().learner_settings(networks) | {
            "target_names": ("actor_critic",),
            "target_update_period": period,
        }

    def loss(self, networks: IMPALANetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The loss of a batch of `Step`s `[N, T + 1, ...]`."""
        config, data = self.config, batch.data
        unrolled = data.observation, data.extras.get("state", ()), data.start_of_episode
        policy, values = networks.actor_critic.unroll(*unrolled)
        actions, values = networks.actions.drawn(data), values.float()
        with torch.no_grad():
            target: Any = context.targets["actor_critic"]
            target_policy, _ = target.unroll(*unrolled)
            target_log_probs = target_policy.log_prob(actions).float()
        log_probs, acting_log_probs = policy.log_prob(actions).float(), data.extras["log_prob"]
        counted = losses.transition_mask(data.mask)
        log_rhos = target_log_probs - acting_log_probs
        vtrace = self.vtrace(data, log_rhos, values)
        surrogate = losses.impact_surrogate(
            log_probs,
            target_log_probs,
            acting_log_probs,
            vtrace.advantages,
            counted,
            config.clip,
            config.clip_target,
        )
        output = self.whole_loss(surrogate.loss, policy, values, vtrace, log_rhos, data, context)
        with torch.no_grad():
            output.metrics["clip_fraction"] = surrogate.clip_fraction
            output.metrics["kl"] = losses.masked_mean(target_policy.kl(policy).float(), counted)
        return output


PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": IMPALA_PRESETS["gymnasium:CartPole-v1"],
    "gymnasium:Acrobot-v1": Preset(
        agent={
            "learning_rate": 2e-3,
            "learning_rate_decay": 200_000,
            "unroll_length": 16,
            "batch_size": 8,
            "vtrace_lambda": 0.95,
            "reward_clip": 0.1,  # Scales the rewards, all -1: values up to -100 would take too long to learn.
        },
        run={**RUN, "max_env_steps": 200_000, "evaluate_period": 50_000},
    ),
    "atari:Pong": IMPALA_PRESETS["atari:Pong"],  # The preset is not tuned.
    "atari:*": Preset(
        agent={
            "reward_clip": 1.0,
            "unroll_length": 50,
            "batch_size": 15,
            "samples_per_insert": 2,
            "target_update_period": 2,
            "max_gradient_norm": 10.0,
            "value_coefficient": 1.0,
            "torso": "nature",
        },
        run={**ATARI_RUN, **RUN, "environment_options": {"sticky_actions": 0.0}, "num_actors": 2},
        source="Liang et al. (2018), pong-appo.yaml of RLlib 2",
        sources={HERE: "torso"},
    ),
}
