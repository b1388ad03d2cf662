"""IMPACT: settings of APPO for a buffer of unrolls, each learned from several times (Luo et al., 2020).

The networks, the loss, and the other settings come from `agents.appo`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agents.appo import APPO, APPOConfig
from agents.appo import PRESETS as APPO_PRESETS
from framework.runs.presets import Preset


@dataclass(frozen=True)
class IMPACTConfig(APPOConfig):
    """Settings of IMPACT: `APPOConfig` with a buffer of unrolls for reuse."""

    samples_per_insert: int = 2  # K, times each unroll is learned from. 1: a queue, oldest first.
    queue_batches: int = 4  # Size of the buffer in batches. More: older data, of more mixed age.


class IMPACT(APPO):
    """Settings of APPO: each unroll is learned from several times."""

    config: IMPACTConfig = IMPACTConfig()


# Each unroll counts `samples_per_insert` times: half of APPO's learning rates.
PRESETS: Mapping[str, Preset] = {
    name: Preset({**preset.agent, "learning_rate": preset.agent["learning_rate"] / 2}, preset.run)
    for name, preset in APPO_PRESETS.items()
    if "*" not in name
}
