"""A new agent in one file, step by step as in docs/agents.md: Q-learning from replay with a softmax policy.

    python examples/new_agent.py [FOLDER]

Trains it for 20,000 steps on CartPole-v1 in one thread and prints its greedy return (about a minute). Metrics
and checkpoints go to FOLDER, if there is one.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

import launch
from framework import adders, core, learners, losses, networks, replay
from framework.datasets import Dataset
from framework.learners import LossOutput
from framework.programs import RunConfig, make_program


@dataclasses.dataclass(frozen=True)
class SoftQConfig:
    """Settings of the agent."""

    discount: float = 0.99  # Per env step.
    n_step: int = 5  # Rewards summed before bootstrapping.
    learning_rate: float = 5e-4  # Of Adam.
    temperature: float = 0.5  # Of the acting policy: higher explores more.
    batch_size: int = 64  # Transitions per learner step.
    samples_per_insert: float = 16.0  # Times a transition is drawn on average.
    min_replay_size: int = 500  # Transitions there before learning begins.


class SoftQNetworks(nn.Module):
    """All parameters. A child is a variable that actors can ask for by name."""

    def __init__(self, spec: Any):
        super().__init__()
        self.q_network = networks.QNetwork(spec.observations, int(spec.actions.num_values), (128, 128))


class SoftQPolicy(core.Policy):
    """Draws actions with probability proportional to exp(Q / temperature); greedy at temperature 0."""

    def __init__(self, nets: SoftQNetworks, temperature: float):
        self._nets, self._temperature = nets, temperature
        self._random = np.random.default_rng(0)

    def initial_state(self, batch_size: int) -> tuple[()]:
        return ()

    @torch.inference_mode()
    def step(self, observation: Any, state: Any) -> tuple[np.ndarray, tuple[()], Any]:
        values = self._nets.q_network(networks.as_tensors(observation)).numpy()
        if self._temperature > 0:  # the Gumbel trick: argmax of noisy values is a softmax draw
            values = values / self._temperature + self._random.gumbel(size=values.shape)
        return values.argmax(-1), (), state

    def seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)


class SoftQ(core.Agent):
    """Q-learning with a target network; ``make_program`` puts the parts into nodes."""

    def __init__(self, config: SoftQConfig | None = None):
        self.config = config or SoftQConfig()

    def make_networks(self, spec: Any) -> SoftQNetworks:
        return SoftQNetworks(spec)

    def make_policy(self, networks: SoftQNetworks, evaluation: bool = False) -> SoftQPolicy:
        return SoftQPolicy(networks, 0.0 if evaluation else self.config.temperature)

    def make_tables(self, spec: Any) -> list[Any]:
        config = self.config
        # The buffer leaves room for a batch on one side and for a step of all envs on the other.
        error_buffer = 64 * config.samples_per_insert + config.batch_size
        return [
            replay.Table(
                name="replay",
                sampler=replay.selectors.Uniform(),
                remover=replay.selectors.Fifo(),
                max_size=50_000,
                rate_limiter=replay.rate_limiters.SampleToInsertRatio(
                    config.samples_per_insert, config.min_replay_size, error_buffer
                ),
            )
        ]

    def make_adder(self, client: Any, spec: Any) -> Any:
        return adders.NStepTransitionAdder(client, self.config.n_step, self.config.discount)

    def make_dataset(self, client: Any) -> Any:
        return Dataset(client, "replay", self.config.batch_size, device="cpu")

    def make_learner(self, networks: SoftQNetworks, spec: Any) -> core.Learner:
        return learners.SGDLearner(
            networks,
            self._loss,
            lambda parameters: torch.optim.Adam(parameters, lr=self.config.learning_rate),
            target_names=("q_network",),
            target_update_rate=0.02,
        )

    def _loss(self, nets: SoftQNetworks, batch: Any, context: Any) -> LossOutput:
        data = batch.data
        with torch.no_grad():
            next_values = context.targets["q_network"](data.next_observation)
            next_selector = nets.q_network(data.next_observation)  # double Q-learning
        errors = losses.double_q_errors(
            nets.q_network(data.observation),
            data.action,
            data.reward.float(),
            self.config.discount * data.discount.float(),
            next_values,
            next_selector,
        )
        return LossOutput(losses.huber(errors, 1.0).mean(), {"td_error": errors.abs().mean()})


def main(max_env_steps: int = 20_000, directory: str | None = None) -> dict[str, Any]:
    config = RunConfig(
        envs_per_actor=8,
        max_env_steps=max_env_steps,
        evaluate_period=2_000,
        directory=directory,
        seed=1,
    )
    program = make_program(SoftQ(), "gymnasium:CartPole-v1", config)
    return launch.launch(program, engine="serial")


if __name__ == "__main__":
    result = main(directory=sys.argv[1] if len(sys.argv) > 1 else None)
    print(f"greedy return after {result['env_steps']:,} steps: {result['episode_return']:.1f}")
