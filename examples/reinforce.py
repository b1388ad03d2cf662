"""An on-policy agent in one file: REINFORCE with a baseline (Williams, 1992; Sutton et al., 2000).

    python examples/reinforce.py [FOLDER]

Trains it for 100,000 steps on CartPole-v1 in one thread and prints its greedy return (half a minute). Metrics
and checkpoints go to FOLDER, if there is one.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

import launch
from framework import losses
from framework.learners import LossContext, LossOutput
from framework.networks import ActorCritic
from framework.programs import RunConfig, make_program
from framework.replay import ReplaySample
from framework.specs import EnvironmentSpec
from framework.torch_agents import OnPolicyAgent, OnPolicyConfig, TorchPolicy
from framework.types import Nest, Step


@dataclasses.dataclass(frozen=True)
class ReinforceConfig(OnPolicyConfig):
    """Settings of the agent, in addition to `OnPolicyConfig`'s."""

    unroll_length: int = 64  # Steps of an env in an unroll.
    learning_rate: float = 3e-3  # Initial learning rate (Adam).
    learning_rate_decay: int | None = 100_000  # Env steps over which the learning rate falls to 0.
    max_gradient_norm: float | None = 0.5  # Larger gradients are scaled down to this.


class ReinforcePolicy(TorchPolicy):
    """Draws actions from the policy's distribution; greedy when it is evaluated."""

    def __init__(
        self, networks: ActorCritic, greedy: bool, variables: tuple[str, ...] = ("encoder", "body", "head")
    ):
        super().__init__(networks, networks.actions, variables)
        self._act, self._greedy = networks.act, greedy

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        policy, state = self._act(observation, state)
        drawn = policy.mode() if self._greedy else policy.sample(self.random)
        # The environment gets continuous actions clipped to their bounds; the loss needs them as drawn.
        return drawn, {"action": drawn} if self.actions.continuous else (), state


class Reinforce(OnPolicyAgent):
    """Makes actions more likely by how much their return exceeds the value of the observation."""

    takes_action_masks = True  # `ActorCritic` draws legal actions only.

    def __init__(self, config: ReinforceConfig | None = None):
        self.config: ReinforceConfig = config or ReinforceConfig()

    def make_networks(self, spec: EnvironmentSpec) -> ActorCritic:
        return ActorCritic(spec)

    def make_policy(self, networks: ActorCritic, evaluation: bool = False) -> ReinforcePolicy:
        return ReinforcePolicy(networks, greedy=evaluation)

    def outputs(self, networks: ActorCritic, data: Step) -> tuple[Any, torch.Tensor]:
        """The distributions over actions and the values of all rows, `[N, T + 1]`."""
        return networks(data.observation)

    def loss(self, networks: ActorCritic, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The loss of unrolls `[N, T + 1, ...]` (`types.Step`), one of each env.

        The last row of an unroll, and of each episode in it, has an observation but no action. `mask` is 0
        there. Returns stop at the end of an episode, and bootstrap from the value of the last observation if
        the unroll ends first, or the episode was truncated.
        """
        config, data = self.config, batch.data
        mask = losses.transition_mask(data.mask)
        policy, values = self.outputs(networks, data)
        discounts = config.discount * data.discount.float()
        returns = losses.lambda_returns(self.rewards(data), discounts, values, mask, lambda_=1.0)
        log_probs = policy.log_prob(networks.actions.drawn(data))
        policy_loss = losses.policy_gradient_loss(log_probs, returns - values.detach(), mask)
        value_loss = losses.value_loss(values, returns, mask)
        entropy = losses.masked_mean(policy.entropy(), mask)
        loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return LossOutput(loss, metrics, weight=mask.sum())


def main(max_env_steps: int = 100_000, directory: str | None = None, seed: int = 1) -> dict[str, Any]:
    config = RunConfig(
        envs_per_actor=8,
        max_env_steps=max_env_steps,
        evaluate_period=20_000,
        directory=directory,
        seed=seed,
    )
    return launch.launch(make_program(Reinforce(), "gymnasium:CartPole-v1", config), engine="serial")


if __name__ == "__main__":
    result = main(directory=sys.argv[1] if len(sys.argv) > 1 else None)
    print(f"greedy return after {result['env_steps']:,} steps: {result['episode_return']:.1f}")
