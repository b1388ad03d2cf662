"""EDAC and SAC-N (An et al., 2021): SAC from data, with an ensemble of critics.

The smallest value of many critics is low where the data does not tell the critics what an action is worth.
EDAC needs fewer critics, because it makes their gradients by the action differ: the critics then disagree
sooner about actions that leave the data. With a `diversity_weight` of 0 it is SAC-N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agents.sac import SAC, SACConfig, SACNetworks
from agents.td3 import PENDULUM, PENDULUM_RUN
from framework import config_checks as check
from framework import losses, networks
from framework.learners import LossContext, LossOutput
from framework.replay import ReplaySample
from framework.runs.presets import Preset
from framework.specs import EnvironmentSpec


@dataclass(frozen=True)
class EDACConfig(SACConfig):
    """Settings of EDAC: SAC's, with the paper's defaults for MuJoCo, and the weight of the diversity."""

    critic_learning_rate: float = 3e-4  # Initial learning rate of the critics (Adam).
    temperature_learning_rate: float = 3e-4  # Learning rate of the temperature's logarithm (Adam).
    num_critics: int = 10  # Critics; targets use the smallest value. More: more conservative, slower.
    diversity_weight: float = 1.0  # Weight of the similarity of the critics' gradients. 0: SAC-N.
    hidden_sizes: tuple[int, ...] = (256, 256, 256)  # Hidden layers of the policy and of each critic.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 2, "num_critics")
        check.at_least(self, 0, "diversity_weight")


class EDAC(SAC):
    """SAC with an ensemble of diverse critics.

    ```python
    config = programs.RunConfig(dataset="data/halfcheetah-medium", max_learner_steps=200_000)
    program = programs.make_program(EDAC(), "gymnasium:HalfCheetah-v5", config)
    ```
    """

    config: EDACConfig = EDACConfig()
    takes_action_masks = False

    def make_networks(self, spec: EnvironmentSpec) -> SACNetworks:
        networks.make_squashed_actions(spec.actions, "EDAC")  # It refuses discrete actions.
        members = ("actions", "policy", "critics.slopes", "temperature.log", "target_entropy")
        return self.custom_networks(spec, SACNetworks, members)

    def loss(self, networks: SACNetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """SAC's losses, and half of `diversity_weight` times `losses.gradient_similarity`.

        It is half because the squared errors of the critics are halved, and the paper's are not.
        """
        output = super().loss(networks, batch, context)
        if not self.config.diversity_weight:
            return output
        gradients = networks.critics.slopes(batch.data.observation, networks.actions.drawn(batch.data))
        similarity = losses.gradient_similarity(gradients).mean()
        loss = output.loss + 0.5 * self.config.diversity_weight * similarity
        return output._replace(loss=loss, metrics={**output.metrics, "gradient_similarity": similarity})


PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset({**PENDULUM, "learning_rate": 1e-3}, PENDULUM_RUN),
}
