"""DroQ (Hiraoka et al., 2022): SAC with dropout and layer norm in the critics, for many learner steps.

Dropout in both critics does what the random pairs of many critics do in REDQ: targets are of another member
of an ensemble at each pass. The learner makes 20 steps per env step, in one of which the policy learns, from
the mean of both critics. `dropout` is a setting of SAC: these are the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agents.sac import SAC, SACConfig
from agents.td3 import MUJOCO_RUN, PENDULUM, PENDULUM_RUN
from framework.runs.presets import Preset


@dataclass(frozen=True)
class DroQConfig(SACConfig):
    """Settings of DroQ: SAC's, with the paper's defaults."""

    samples_per_insert: float = 5120.0  # Draws of an item. Divided by batch_size: learner steps per item.
    critic_learning_rate: float = 3e-4  # Initial learning rate of the critics (Adam).
    temperature_learning_rate: float = 3e-4  # Learning rate of the temperature's logarithm (Adam).
    # Critics, drawn at each step, of which a target takes the smallest; the policy follows the mean of all.
    target_critics: int | None = 2
    actor_delay: int = 20  # Learner steps per update of the policy and the temperature.
    layer_norm: bool = True  # Normalizes the critics' hidden layers: more stable with many updates per step.
    dropout: float = 0.01  # Share of the critics' hidden units that each pass of the learner drops.


class DroQ(SAC):
    """SAC with dropout in the critics.

    ```python
    agent = DroQ(DroQConfig(dropout=0.005))
    program = programs.make_program(agent, "gymnasium:Walker2d-v5", programs.RunConfig(max_env_steps=100_000))
    ```
    """

    config: DroQConfig = DroQConfig()


_WALKING = {"min_replay_size": 5_000, "dropout": 0.005}
PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset(
        agent={
            **PENDULUM,
            "batch_size": 64,
            "samples_per_insert": 256.0,  # Four learner steps per env step.
            "learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
            "temperature_learning_rate": 1e-3,
            "actor_delay": 2,
        },
        run={**PENDULUM_RUN, "max_env_steps": 8_000, "evaluate_period": 2_000},
    ),
    # The authors' dropout, and for Hopper their target entropy.
    "gymnasium:Hopper-v5": Preset(
        {**_WALKING, "target_entropy": -1.0}, {**MUJOCO_RUN, "max_env_steps": 100_000}
    ),
    "gymnasium:Walker2d-v5": Preset(_WALKING, {**MUJOCO_RUN, "max_env_steps": 100_000}),
}
