"""RLPD (Ball et al., 2023): SAC that acts, with half of each batch from data.

It changes three things in SAC: a fixed share of each batch is data of any quality, critics have normalized
layers, so that values do not grow where there is no data, and a random pair of many critics rates the targets
(REDQ). The learner then makes many steps per env step, of which the policy takes part in few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from agents.sac import SAC, SACConfig
from agents.td3 import PENDULUM_RUN
from framework import environments
from framework.datasets import record
from framework.runs.presets import Preset
from framework.types import Step


@dataclass(frozen=True)
class RLPDConfig(SACConfig):
    """Settings of RLPD: SAC's, with the paper's defaults."""

    # Draws of an actor's item. Divided by `(1 - demonstration_fraction) * batch_size`: learner steps per
    # item.
    samples_per_insert: float = 2560.0
    critic_learning_rate: float = 3e-4  # Initial learning rate of the critics (Adam).
    temperature_learning_rate: float = 3e-4  # Learning rate of the temperature's logarithm (Adam).
    num_critics: int = 10  # Critics. More: better values, slower.
    target_critics: int | None = 2  # Critics, drawn at each step, of which a target takes the smallest.
    actor_delay: int = 20  # Learner steps per update of the policy and the temperature.
    layer_norm: bool = True  # Normalizes the critics' hidden layers: more stable with many updates per step.


class RLPD(SAC):
    """SAC with prior data.

    ```python
    agent = RLPD(RLPDConfig(demonstrations="data/hopper-medium"))
    program = programs.make_program(agent, "gymnasium:Hopper-v5", programs.RunConfig(max_env_steps=50_000))
    ```
    """

    config: RLPDConfig = RLPDConfig()
    needs_demonstrations = True


def pendulum(count: int = 10, seed: int = 0) -> Iterator[Step]:
    """Episodes of `gymnasium:Pendulum-v1` that gain energy, and hold the pendulum where it is upright."""

    def act(observation: np.ndarray) -> np.ndarray:
        cosine, sine, velocity = observation.T
        energy = velocity**2 / 6 + 5.0 * (cosine - 1.0)  # 0 when it is upright and still.
        swing, hold = -2.0 * np.sign(velocity * energy), -10.0 * sine - 2.0 * velocity
        return np.where(cosine > 0.9, hold, swing).clip(-2.0, 2.0)[:, None].astype(np.float32)

    environment = environments.make("gymnasium:Pendulum-v1", num_envs=1, seed=seed)
    yield from record(environment, act, count)
    environment.close()


PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset(
        agent={
            "demonstrations": "agents.rlpd:pendulum",
            "learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
            "min_replay_size": 200,
            "batch_size": 128,
            "samples_per_insert": 128.0,
            "num_critics": 4,
            "actor_delay": 2,
            "hidden_sizes": (64, 64),
        },
        run={**PENDULUM_RUN, "max_env_steps": 5_000, "evaluate_period": 1_000},
    ),
}
