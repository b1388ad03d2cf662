"""PPO with a cost critic: the return as large as it can be while the cost keeps to a limit.

The multiplier of the cost follows from a PID controller (Stooke, Achiam and Abbeel, 2020). The rewards of
the environment are a dict: `reward` and `cost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agents.ppo import PPO, PPOConfig, PPONetworks, Rows
from framework import adders, core, losses, networks
from framework import config_checks as check
from framework.learners import LossContext
from framework.losses.masking import where_counted
from framework.runs.presets import Preset
from framework.specs import COST, REWARD, EnvironmentSpec
from framework.types import Step


@dataclass(frozen=True)
class PPOLagrangianConfig(PPOConfig):
    """Settings of PPO with a cost critic, in addition to `PPOConfig`'s."""

    cost_limit: float = 0.1  # Mean cost per env step that the policy keeps to.
    initial_multiplier: float = 0.0  # Initial weight of the cost's advantages beside the reward's.
    proportional_gain: float = 1.0  # Multiplier per cost above the limit. Damps swings of the cost.
    integral_gain: float = 0.1  # Growth of the multiplier per learner step and cost above the limit.
    derivative_gain: float = 0.0  # Multiplier per growth of the cost in a learner step.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "cost_limit", "initial_multiplier")
        check.at_least(self, 0, "proportional_gain", "integral_gain", "derivative_gain")
        check.one_of(self, (None,), "reward_clip")  # The limit is of whole costs.


class LagrangianNetworks(PPONetworks):
    """The variables of PPO with values of the reward and of the cost, and the state of the controller."""

    multiplier: torch.Tensor
    integral: torch.Tensor
    last_cost: torch.Tensor

    def __init__(self, config: PPOLagrangianConfig, spec: EnvironmentSpec):
        super().__init__(config, spec)
        width = next(self.value_head.parameters()).shape[1]
        self.value_head = networks.MLP(width, (), 2, orthogonal_gain=1.0)
        self.cost_scale = networks.RewardScale()
        self.register_buffer("multiplier", torch.tensor(config.initial_multiplier))
        self.register_buffer("integral", torch.tensor(config.initial_multiplier))
        self.register_buffer("last_cost", torch.zeros(()))


class PPOLagrangian(PPO):
    """PPO under a limit of the mean cost per env step."""

    config: PPOLagrangianConfig = PPOLagrangianConfig()

    def make_networks(self, spec: EnvironmentSpec) -> LagrangianNetworks:
        if not (isinstance(spec.rewards, Mapping) and {*spec.rewards} == {REWARD, COST}):
            raise ValueError(
                f"rewards: got {spec.rewards!r}, expected a dict of {REWARD} and {COST}. Declare it in the "
                "environment's reward_spec, and return such a dict as reward."
            )
        parts = ("actions", "normalizer", "reward_scale", "cost_scale", "multiplier", "integral", "last_cost")
        members = (*parts, "kl_coefficient", "initial_state", "act", "forward")
        return self.custom_networks(spec, LagrangianNetworks, members)

    def scaled_rewards(  # type: ignore[override]
        self, networks: LagrangianNetworks, data: Step, context: LossContext, starts: Any, mask: Any
    ) -> torch.Tensor:
        """Rewards and costs, `[N, T + 1, 2]`. Adapts the multiplier to the mean cost of the batch."""
        config, add = self.config, context.total or (lambda tensor: tensor)
        costs = data.reward[COST].float()
        sums = add(torch.stack([where_counted(costs, mask).sum(), mask.sum()]))
        cost = sums[0] / sums[1].clamp(min=1.0)
        gains = config.proportional_gain, config.integral_gain, config.derivative_gain
        result = losses.pid_lagrangian(cost, networks.last_cost, networks.integral, config.cost_limit, gains)
        for buffer, value in zip((networks.multiplier, networks.integral), result, strict=True):
            buffer.copy_(value)
        networks.last_cost.copy_(cost)
        before = data.extras.get(adders.RUNNING_RETURN, {REWARD: None, COST: None})
        pairs = (REWARD, networks.reward_scale), (COST, networks.cost_scale)
        rest = context, starts, mask
        return torch.stack(
            [self.scaled(scale, data.reward[name].float(), before[name], *rest) for name, scale in pairs], -1
        )

    def estimates(  # type: ignore[override]
        self, networks: LagrangianNetworks, rewards: Any, discounts: Any, values: Any, mask: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        both = zip(rewards.unbind(-1), values.unbind(-1), strict=True)
        (advantages, targets, metrics), (of_costs, cost_targets, cost_metrics) = [
            super(PPOLagrangian, self).estimates(networks, reward, discounts, value, mask)
            for reward, value in both
        ]
        weight = networks.multiplier
        combined = (advantages - weight * of_costs) / (1.0 + weight)
        more = {"multiplier": weight.clone(), "cost": networks.last_cost.clone()}
        metrics |= {f"cost_{name}": value for name, value in cost_metrics.items()} | more
        return combined, torch.stack([targets, cost_targets], -1), metrics

    def value_loss(self, values: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The sum of both values' losses."""
        parts = [each.unbind(-1) for each in (values, rows.value, rows.target)]
        return sum(
            super(PPOLagrangian, self).value_loss(value, rows._replace(value=old, target=target))
            for value, old, target in zip(*parts, strict=True)
        )  # type: ignore[return-value]

    def score(self, row: Mapping[str, Any]) -> tuple[float, ...]:
        """The best evaluation has the least cost beyond the limit, and then the largest return."""
        excess = row["episode_cost"] / row["episode_length"] - self.config.cost_limit
        return -max(0.0, excess), row["episode_return"]

    def play(self, loop: core.Loop, policy: core.Policy, num_episodes: int) -> dict[str, Any]:
        """Plays episodes; `episode_return` is the reward's, and `episode_cost` the cost's."""
        played = loop.run_episodes(num_episodes)
        returns = played["episode_return"]
        return {**played, "episode_return": returns[REWARD], "episode_cost": returns[COST]}


PRESETS: Mapping[str, Preset] = {
    "tasks:WindingRoad": Preset(
        agent={
            "unroll_length": 100,
            "epochs": 8,
            "minibatch_size": 200,
            "learning_rate": 1e-3,
            "learning_rate_decay": 100_000,
            "learning_rate_end": 0.1,  # At 0, the cost could no longer follow the multiplier.
            "integral_gain": 0.3,
            "normalize_rewards": True,
            "initial_std": 0.5,
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 16,
            "max_env_steps": 100_000,
            "evaluate_period": 10_000,
            "num_evaluation_episodes": 50,
            "learner_log_period": 10,
        },
    ),
}
