"""Two DQN learners with different discounts on one replay, each evaluated.

    python examples/two_discounts.py [FOLDER]

The actors act with the first learner. The second one learns from the same experience how to act for the near
future only. Trains 20,000 steps on CartPole-v1 in one thread and prints both greedy returns (about a minute).
Metrics and checkpoints of both go to FOLDER, if there is one.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import launch
from agents.dqn import DQN, DQNConfig
from framework import adders, core, replay
from framework.datasets import Dataset
from framework.programs import RunConfig, make_program
from framework.replay.contracts import ReplayClient
from framework.specs import EnvironmentSpec

SHORT_TABLE = "replay_short"


class Short(DQN):
    """DQN that learns from the second table."""

    def make_dataset(self, client: ReplayClient) -> Dataset:
        return Dataset(client, SHORT_TABLE, self.config.batch_size, device=self.device)


class TwoDiscounts(DQN):
    """DQN with a second learner.

    An item is in two tables, and its observations are stored once. The rate limiter of each table keeps the
    ratio of one learner.

    Args:
      config: settings of the first learner, whose parameters act. `n_step` is 1, because a reward of several
        steps would hold one discount.
      short_discount: discount of the second learner.
    """

    def __init__(self, config: DQNConfig | None = None, short_discount: float = 0.5):
        super().__init__(dataclasses.replace(config or DQNConfig(), n_step=1))
        self.short_discount = short_discount

    def make_tables(self, spec: EnvironmentSpec) -> list[replay.Table]:
        (table,) = super().make_tables(spec)
        return [table, table.replace(name=SHORT_TABLE)]

    def make_adder(self, client: ReplayClient, spec: EnvironmentSpec) -> adders.Adder:
        return adders.NStepTransitionAdder(
            client,
            self.config.n_step,
            self.config.discount,
            priority_fns={adders.REPLAY_TABLE: None, SHORT_TABLE: None},
            max_in_flight_items=self.config.insert_burst,
        )

    def build(self, graph: core.Graph) -> None:
        server = graph.add_replay()
        variables = graph.add_variable_source(graph.add_learner(server))
        graph.add_actors(server, variables)
        graph.add_evaluator(variables)
        short = Short(dataclasses.replace(self.config, discount=self.short_discount))
        learner = graph.add_learner(server, agent=short, name="learner_short")
        graph.add_evaluator(graph.add_variable_source(learner), name="evaluator_short")


def main(directory: str | None = None, max_env_steps: int = 20_000) -> dict[str, Any]:
    """Trains and returns the result of the program."""
    config = RunConfig(
        directory=directory,
        seed=1,
        envs_per_actor=4,
        max_env_steps=max_env_steps,
        evaluate_period=max_env_steps // 2,
    )
    agent = TwoDiscounts(DQNConfig(samples_per_insert=8.0, learning_rate_decay=max_env_steps))
    program = make_program(agent, "gymnasium:CartPole-v1", config)
    result: dict[str, Any] = launch.launch(program, engine="serial")
    return result


if __name__ == "__main__":
    returns = main(sys.argv[1] if len(sys.argv) > 1 else None)
    print(f"discount 0.99: greedy return {returns['episode_return']:.1f}")
    print(f"discount 0.50: greedy return {returns['evaluator_short']['episode_return']:.1f}")
