"""A node that recomputes priorities: prioritized DQN whose replay is reanalysed with the newest parameters.

    python examples/reanalyse.py

The priority of an item is the error that the learner saw when it last drew the item. In between, the
parameters change. The node draws items for each new version, sets their priorities to today's errors, and
gives the draw back, so that it does not count for the replay ratio:

```text
actors ─▶ replay ─▶ learner ─▶ actors, evaluator
             ▲         │ parameters
             └── reanalyser
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tree

import launch
from agents.dqn import DQN, DQNConfig
from framework import adders, core, losses
from framework.programs import Callback, RunConfig, make_program
from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.specs import EnvironmentSpec
from framework.variables import VariableClient

BATCH_SIZE = 256  # Items per version of the parameters.


class Reanalyser(core.Worker):
    """Sets the priorities of a batch of items for each new version of the parameters.

    Args:
      agent: makes the networks.
      spec: the spec of one env.
      replay: the replay client.
      learner: the learner, whose parameters are used.
      monitor: takes the rows of metrics.
    """

    def __init__(self, agent: DQN, spec: EnvironmentSpec, *, replay: Any, learner: Any, monitor: Any):
        self._config, self._networks = agent.config, agent.make_networks(spec)
        self._replay, self._source = replay, replay.source()
        self._learner, self._monitor = learner, monitor
        self._variables = VariableClient(learner, self._networks)
        self._steps = 0

    def ready(self) -> bool:
        """Whether there is a newer version, and a batch to draw."""
        newer = self._learner.wait_for_version(max(1, self._variables.version + 1), 0.0)
        return newer and self._source.can_sample(adders.REPLAY_TABLE, BATCH_SIZE)

    def step(self) -> None:
        # Bounded waits, to notice a stop.
        if not self._learner.wait_for_version(max(1, self._variables.version + 1), 0.5):
            return
        try:
            sample, drawn = self._source.draw(adders.REPLAY_TABLE, BATCH_SIZE, 0.5, None, False)
        except (DeadlineExceededError, ServerClosed):
            return
        keys, data = np.array(sample.info.key), tree.map_structure(np.array, sample.data)
        old = np.array(sample.info.priority)
        self._source.give_back(drawn)
        self._variables.update(wait=True)
        new = self.priorities(tree.map_structure(torch.as_tensor, data))
        self._replay.update_priorities(adders.REPLAY_TABLE, keys, new)
        self._steps += 1
        if self._steps % 10 == 0:
            change = float(np.abs(new - old).mean())
            self._monitor.write("reanalyser", {"steps": self._steps, "items": len(new), "change": change})

    @torch.no_grad()
    def priorities(self, data: Any) -> np.ndarray:
        """The errors of transitions `[N, ...]` under the newest network alone: float64 `[N]`."""
        next_values = self._networks.values(data.next_observation)
        errors = losses.double_q_errors(
            self._networks.values(data.observation),
            data.action,
            data.reward.float(),
            self._config.discount * data.discount.float(),
            next_values,
            next_values,
        )
        return errors.abs().double().numpy() + 1e-6

    def close(self) -> None:
        self._source.close()


class ReanalysedDQN(DQN):
    """Prioritized DQN with a node more."""

    def build(self, graph: core.Graph) -> None:
        replay = graph.add_replay()
        learner = graph.add_learner(replay)
        graph.add_actors(replay, learner)
        graph.add_evaluator(learner)
        clients = {"replay": replay, "learner": learner, "monitor": graph.monitor}
        graph.add_node("reanalyser", launch.CourierNode(Reanalyser, self, graph.spec, **clients))


def main(
    max_env_steps: int = 30_000, engine: str = "processes", seed: int = 1, callbacks: Sequence[Callback] = ()
) -> Any:
    agent = ReanalysedDQN(DQNConfig(prioritized=True, samples_per_insert=24.0, learning_rate_decay=50_000))
    config = RunConfig(
        envs_per_actor=4, max_env_steps=max_env_steps, evaluate_period=max_env_steps, seed=seed
    )
    program = make_program(agent, "gymnasium:CartPole-v1", config, callbacks=callbacks)
    return launch.launch(program, engine=engine)


if __name__ == "__main__":
    print(f"greedy return: {main()['episode_return']:.1f}")
