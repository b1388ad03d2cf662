"""A new agent in one file, step by step as in docs/agents.md: Q-learning from replay with a softmax policy.

    python examples/new_agent.py [FOLDER]

Trains it for 50,000 steps on CartPole-v1 in one thread and prints its greedy return (about a minute). Metrics
and checkpoints go to FOLDER, if there is one.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import nn

import launch
from framework import losses, networks
from framework.learners import LossContext, LossOutput
from framework.programs import RunConfig, make_program
from framework.replay import ReplaySample
from framework.specs import EnvironmentSpec
from framework.torch_agents import OffPolicyAgent, OffPolicyConfig, TorchPolicy
from framework.types import Nest


@dataclasses.dataclass(frozen=True)
class SoftQConfig(OffPolicyConfig):
    """Settings of the agent, in addition to `OffPolicyConfig`'s."""

    n_step: int = 5  # Rewards summed before bootstrapping.
    samples_per_insert: float = 24.0  # Times a transition is drawn on average.
    learning_rate_decay: int | None = 50_000  # Env steps over which the learning rate falls to 0.
    max_gradient_norm: float | None = 10.0  # Larger gradients are scaled down to this.
    temperature: float = 2.0  # Units of the return: a higher one explores more.


class SoftQNetworks(nn.Module):
    """All parameters. A child is a variable that actors can ask for by name."""

    def __init__(self, spec: EnvironmentSpec):
        super().__init__()
        self.actions = networks.Actions(spec.actions)
        num_actions = int(spec.actions.num_values)
        self.q_network = networks.QNetwork(spec.observations, num_actions, (128, 128), layer_norm=True)


class SoftQPolicy(TorchPolicy):
    """Draws actions with probability proportional to exp(Q / temperature); greedy at temperature 0."""

    def __init__(self, nets: SoftQNetworks, temperature: float):
        super().__init__(nets, nets.actions, variables=("q_network",))
        self._q_network, self._temperature = nets.q_network, temperature

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        values = self._q_network(observation)
        if self._temperature == 0:
            return values.argmax(-1), (), state
        return networks.Categorical(values / self._temperature).sample(self.random), (), state


class SoftQ(OffPolicyAgent):
    """Q-learning with a target network."""

    config: SoftQConfig = SoftQConfig()
    target_names = ("q_network",)

    def make_networks(self, spec: EnvironmentSpec) -> SoftQNetworks:
        return SoftQNetworks(spec)

    def make_policy(self, networks: SoftQNetworks, evaluation: bool = False) -> SoftQPolicy:
        return SoftQPolicy(networks, 0.0 if evaluation else self.config.temperature)

    def loss(self, networks: SoftQNetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        data = batch.data
        with torch.no_grad():
            next_values = context.targets["q_network"](data.next_observation)
            next_selector = networks.q_network(data.next_observation)  # double Q-learning
        errors = losses.double_q_errors(
            networks.q_network(data.observation),
            data.action,
            data.reward.float(),
            self.config.discount * data.discount.float(),
            next_values,
            next_selector,
        )
        return LossOutput(losses.huber(errors).mean(), {"td_error": errors.abs().mean()})


def main(max_env_steps: int = 50_000, directory: str | None = None, seed: int = 1) -> dict[str, Any]:
    config = RunConfig(
        envs_per_actor=8,
        max_env_steps=max_env_steps,
        evaluate_period=5_000,
        directory=directory,
        seed=seed,
    )
    return launch.launch(make_program(SoftQ(), "gymnasium:CartPole-v1", config), engine="serial")


if __name__ == "__main__":
    result = main(directory=sys.argv[1] if len(sys.argv) > 1 else None)
    print(f"greedy return after {result['env_steps']:,} steps: {result['episode_return']:.1f}")
