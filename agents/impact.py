"""IMPACT: APPO with a circular buffer of unrolls, each learned from several times (Luo et al., 2020).

The networks, the loss, and the settings are those of `agents.appo`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agents.appo import APPO, APPOConfig
from framework.core import NetworksFn
from framework.programs.presets import Preset


@dataclass(frozen=True)
class IMPACTConfig(APPOConfig):
    """Settings of IMPACT: those of `APPOConfig`, with a circular buffer."""

    samples_per_insert: int = 2  # K, times each unroll is learned from. 1 takes the oldest first.
    queue_batches: int = 4  # Size of the buffer in batches. More: older data, which differs more in a batch.


class IMPACT(APPO):
    """Importance-weighted asynchronous actor-critic with a clipped target network and reused data."""

    def __init__(self, config: IMPACTConfig | None = None, networks_fn: NetworksFn | None = None):
        super().__init__(config or IMPACTConfig(), networks_fn)


_RUN = {"envs_per_actor": 8, "publish_period": 1, "learner_log_period": 50}

PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": Preset(
        agent={
            "learning_rate": 2e-3,
            "learning_rate_decay": 150_000,
            "unroll_length": 16,
            "batch_size": 8,
            "vtrace_lambda": 0.95,
            "value_coefficient": 0.1,  # Returns go up to 100: their gradient would drown the policy's.
        },
        run={**_RUN, "max_env_steps": 150_000, "evaluate_period": 25_000},
    ),
    "gymnasium:Acrobot-v1": Preset(
        agent={
            "learning_rate": 1e-3,
            "learning_rate_decay": 200_000,
            "unroll_length": 16,
            "batch_size": 8,
            "vtrace_lambda": 0.95,
            "reward_clip": 0.1,  # Scales the rewards, all -1: values up to -100 would take too long to learn.
        },
        run={**_RUN, "max_env_steps": 200_000, "evaluate_period": 50_000},
    ),
}
