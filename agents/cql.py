"""CQL: conservative Q-learning (Kumar et al., 2020), CQL(H) on SAC, for continuous and discrete actions.

SAC's losses on data, and a penalty on the critics' values of actions that the data does not have, so that the
policy does not follow values that nothing has corrected. The penalty has a soft maximum over all actions. It
is exact for one discrete action, and otherwise estimated from uniform actions and the policy's.

With `calibrated` it is Cal-QL (Nakamoto et al., 2023): the penalty presses no value below the return of the
data, so that an agent that goes on with actors does not begin by unlearning values that were too low.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from agents.sac import SAC, SACConfig, SACNetworks
from agents.td3 import PENDULUM, PENDULUM_RUN
from framework import adders, losses, specs
from framework import config_checks as check
from framework.adders import PriorityFn
from framework.learners import LossContext, LossOutput
from framework.networks import SquashedGaussian, mask_values
from framework.replay import ReplaySample
from framework.replay.contracts import ReplayClient
from framework.runs.presets import Preset
from framework.types import Nest, Transition


@dataclass(frozen=True)
class CQLConfig(SACConfig):
    """Settings of CQL: SAC's, with the paper's defaults for MuJoCo, and the penalty's."""

    learning_rate: float = 1e-4  # Initial learning rate of the policy (Adam).
    critic_learning_rate: float = 3e-4  # Initial learning rate of the critics (Adam).
    conservative_weight: float = 5.0  # Weight of the penalty. More: nearer to the data's actions.
    # Continuous actions of each kind for the penalty: uniform, the policy's, and the policy's one step later.
    num_samples: int = 10
    # Whether the penalty presses no value below the data's return (Cal-QL), for going on with actors.
    calibrated: bool = False
    random_start: bool = False  # Acts uniformly at random until learning begins, not with the first policy.
    hidden_sizes: tuple[int, ...] = (256, 256, 256)  # Hidden layers of the policy and of each critic.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "num_samples")
        check.at_least(self, 0, "conservative_weight")
        if self.calibrated:
            check.one_of(self, (0,), "hindsight_goals")  # An item with another goal has no return.


class CQL(SAC):
    """Conservative Q-learning.

    ```python
    config = programs.RunConfig(dataset="data/hopper-medium-replay", max_learner_steps=200_000)
    program = programs.make_program(CQL(), "gymnasium:Hopper-v5", config)
    ```
    """

    config: CQLConfig = CQLConfig()

    def make_adder(
        self, client: ReplayClient, spec: specs.EnvironmentSpec, priority_fn: PriorityFn | None = None
    ) -> adders.Adder:
        config = self.config
        if not config.calibrated:
            return super().make_adder(client, spec, priority_fn)
        return adders.ReturnToGoAdder(
            client,
            config.n_step,
            config.discount,
            priority_fns={self.items_table: priority_fn},
            max_in_flight_items=config.insert_burst,
            frame_stack=specs.frame_stack(spec.observations),
            reward_clip=config.reward_clip,
        )

    def loss(self, networks: SACNetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """SAC's losses, and `conservative_weight` times the penalty, summed over the critics (equation 4)."""
        output = super().loss(networks, batch, context)
        penalties = self.penalties(networks, batch.data, context)
        penalty = penalties.sum(0).mean()
        metrics = {**output.metrics, "conservative_penalty": penalties.mean()}
        return output._replace(loss=output.loss + self.config.conservative_weight * penalty, metrics=metrics)

    def penalties(self, networks: SACNetworks, data: Transition, context: LossContext) -> torch.Tensor:
        """By how much each critic's soft maximum exceeds its value of the data's action, `[C, N]`."""
        taken, observation = networks.actions.drawn(data), data.observation
        if not networks.actions.continuous:
            values = networks.critics(observation)
            known = values.gather(-1, taken.expand(len(values), -1).unsqueeze(-1)).squeeze(-1)
            return losses.conservative_penalty(mask_values(self.calibrated(values, data), observation), known)
        with torch.no_grad():
            drawn = [self._drawn(networks, each, context) for each in (observation, data.next_observation)]
            actions, log_densities = (list(each) for each in zip(*drawn, strict=True))
            # A uniform action between -1 and 1 in each of D dimensions has the density 2^-D.
            actions.append(2.0 * context.uniform_like(actions[0]) - 1.0)
            size = actions[0].shape[-1]
            log_densities.append(torch.full_like(log_densities[0], -size * math.log(2.0)))
        values = networks.critics(observation, torch.cat(actions, 1))
        if self.config.calibrated:  # In the authors' code, too, values of uniform actions are not.
            own = 2 * self.config.num_samples
            values = torch.cat([self.calibrated(values[..., :own], data), values[..., own:]], -1)
        known = networks.critics(observation, taken)
        return losses.sampled_conservative_penalty(values, torch.cat(log_densities, 1), known)

    def calibrated(self, values: torch.Tensor, data: Transition) -> torch.Tensor:
        """`values` `[C, N, S]`, or with `calibrated` the returns of the data where these are larger."""
        if not self.config.calibrated:
            return values
        returns = self.config.reward_scale * data.extras[adders.RETURN_TO_GO]
        return losses.calibrated_values(values, returns)

    def _drawn(
        self, networks: SACNetworks, observation: Nest, context: LossContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions `[N, S, D]` of the policy, and their log densities `[N, S]`."""
        base = networks.policy(observation).base
        mean = base.mean.unsqueeze(1).expand(-1, self.config.num_samples, -1)
        policy = SquashedGaussian(mean, base.log_std.unsqueeze(1))
        return policy.rsample_with_log_prob(noise=context.normal_like(mean))


PRESETS: Mapping[str, Preset] = {
    # 500, greedy over 100 episodes, at 20,000 learner steps on data of 269.6, seeds 1 to 3.
    "gymnasium:CartPole-v1": Preset(
        {
            "batch_size": 128,
            "hidden_sizes": (64, 64),
            "learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
        }
    ),
    # -149.9, greedy over 100 episodes, the best of 20,000 learner steps on data of -585.9, seed 1.
    "gymnasium:Pendulum-v1": Preset({**PENDULUM, "learning_rate": 1e-3}, PENDULUM_RUN),
}
