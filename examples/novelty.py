"""Random network distillation (Burda et al., 2018): DQN with a reward for what is new to it.

    python examples/novelty.py

A corridor gives its only reward at the far end, which random actions do not reach. A node of its own, with
its own optimizer, learns to predict what a fixed random network says of an observation. Where it errs, the
observation is new, and DQN's learner adds the error to the reward:

```text
actors ─▶ replay ─┬─ table "replay"  ─▶ DQN's learner ─▶ actors, evaluator
                  └─ table "novelty" ─▶ predictor ─▶ DQN's learner          (the predictor's parameters)
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import dm_env
import numpy as np
import torch
from dm_env import specs as dm_specs
from torch import nn

import launch
from agents.dqn import DQN, DQNConfig, DQNNetworks
from framework import adders, core, learners, networks, replay
from framework.datasets import Dataset
from framework.learners import LossContext, LossOutput
from framework.parameters import arrays_of
from framework.programs import RunConfig, make_program
from framework.specs import EnvironmentSpec
from framework.variables import VariableBlock, VariableClient, Variables, shared_path

TABLE = "novelty"


class Corridor(dm_env.Environment):
    """`length` cells in a row. Action 1 goes right, 0 left. The last cell gives 1 and ends the episode."""

    def __init__(self, length: int = 20):
        self._length, self._cell, self._time = length, 0, 0

    def observation_spec(self) -> dm_specs.Array:
        return dm_specs.Array((self._length,), np.float32)

    def action_spec(self) -> dm_specs.DiscreteArray:
        return dm_specs.DiscreteArray(2)

    def reset(self) -> dm_env.TimeStep:
        self._cell = self._time = 0
        return dm_env.restart(self._observation())

    def step(self, action: Any) -> dm_env.TimeStep:
        self._time += 1
        self._cell = max(0, self._cell + (1 if action else -1))
        if self._cell == self._length - 1:
            return dm_env.termination(1.0, self._observation())
        if self._time == 30:
            return dm_env.truncation(0.0, self._observation())
        return dm_env.transition(0.0, self._observation())

    def _observation(self) -> np.ndarray:
        return np.eye(self._length, dtype=np.float32)[self._cell]


@dataclasses.dataclass(frozen=True)
class RNDConfig(DQNConfig):
    """Settings of DQN with novelty, in addition to `DQNConfig`'s."""

    novelty_coefficient: float = 1.0  # Weight in the reward of the novelty, about 1 for what is new.
    novelty_learning_rate: float = 1e-3  # Learning rate of the predictor. Higher forgets novelty faster.
    novelty_samples_per_insert: float = 4.0  # Times the predictor sees a transition on average.


class Novelty(nn.Module):
    """How badly `predictor` predicts the random network `target`, in units of the first batch's error."""

    scale: torch.Tensor

    def __init__(self, spec: EnvironmentSpec):
        super().__init__()

        def network() -> nn.Module:
            encoder = networks.ObservationEncoder(spec.observations)
            return nn.Sequential(encoder, networks.MLP(encoder.output_size, (64,), 32))

        self.target, self.predictor = network().requires_grad_(False), network()
        self.register_buffer("scale", torch.zeros(()))  # 0 until the first batch.

    def forward(self, observation: Any) -> torch.Tensor:
        """`[N]` for observations `[N, ...]`; 0 before the first batch."""
        error = (self.predictor(observation) - self.target(observation)).square().mean(-1)
        return torch.where(self.scale > 0, error / self.scale, torch.zeros_like(error))


class RNDNetworks(DQNNetworks):
    """DQN's networks and a copy of the predictor, which DQN's optimizer leaves alone."""

    def __init__(self, config: DQNConfig, spec: EnvironmentSpec):
        super().__init__(config, spec)
        self.novelty = Novelty(spec).requires_grad_(False)


class NoveltyWorker(core.Worker):
    """Trains the predictor with batches of the table `novelty`, and serves its parameters.

    Args:
      config: settings.
      spec: the spec of one env.
      replay: the replay client.
      monitor: takes the rows of metrics.
      checkpointer: keeps the state with the run; None without a folder.
    """

    def __init__(
        self, config: RNDConfig, spec: EnvironmentSpec, *, replay: Any, monitor: Any, checkpointer: Any
    ):
        self._novelty = Novelty(spec)
        rate = config.novelty_learning_rate
        self._optimizer = learners.Adam(list(self._novelty.predictor.parameters()), lr=rate)
        self._dataset = Dataset(replay, TABLE, config.batch_size, device="cpu")
        self._monitor, self._checkpointer, self._steps = monitor, checkpointer, 0
        self._finished = False
        state = None if checkpointer is None else checkpointer.get(TABLE)
        if state is not None:
            self._novelty.load_state_dict(state["networks"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._steps = state["steps"]
        self._block = VariableBlock(self._parameters(), shared_path())
        self._publish()

    def variable_block(self) -> VariableBlock:
        """For `VariableClient`: the newest parameters."""
        return self._block

    def get_variables(self, names: Sequence[str] = (), newer_than: int = -1) -> Variables | None:
        """For a `VariableClient` of another machine."""
        return self._block.get_variables(names, newer_than)

    def finished(self) -> bool:
        return self._finished

    def ready(self) -> bool:
        return self._dataset.ready()

    def step(self) -> None:
        sample = next(self._dataset, None)
        if sample is None:
            self._finished = True  # The program is being stopped.
            return
        with torch.no_grad():
            target = self._novelty.target(sample.data.next_observation)
        error = (self._novelty.predictor(sample.data.next_observation) - target).square().mean()
        if not self._novelty.scale:
            self._novelty.scale.copy_(error.detach())
        self._optimizer.zero_grad()
        error.backward()
        self._optimizer.step()
        self._steps += 1
        self._publish()
        if self._steps % 10 == 0:
            self._monitor.write(
                TABLE, {"steps": self._steps, "error": float(error.detach() / self._novelty.scale)}
            )

    def run(self) -> None:
        while not self._finished:
            self.step()
        launch.wait_for_stop()

    def close(self) -> None:
        self._dataset.close()
        if self._checkpointer is not None:
            networks_, optimizer = self._novelty.state_dict(), self._optimizer.state_dict()
            state = {"networks": networks_, "optimizer": optimizer, "steps": self._steps}
            self._checkpointer.put(TABLE, state)

    def _parameters(self) -> dict[str, dict[str, np.ndarray]]:
        return arrays_of({TABLE: self._novelty.state_dict()})

    def _publish(self) -> None:
        if self._block.version < self._steps:
            self._block.publish(self._steps, self._parameters(), 0)


class RND(DQN):
    """DQN whose learner adds the novelty of the next observation to the reward."""

    config: RNDConfig

    def __init__(self, config: RNDConfig | None = None):
        super().__init__(config or RNDConfig(), networks_fn=RNDNetworks)

    def build(self, graph: core.Graph) -> None:
        replay = graph.add_replay()
        services = {"monitor": graph.monitor, "checkpointer": graph.checkpointer}
        node = launch.CourierNode(NoveltyWorker, self.config, graph.spec, replay=replay, **services)
        novelty = graph.add_node("novelty", node)
        learner = graph.add_learner(replay, clients={TABLE: novelty})
        graph.add_actors(replay, learner)
        graph.add_evaluator(learner)

    def make_tables(self, spec: EnvironmentSpec) -> list[replay.Table]:
        config, size = self.config, self.config.batch_size
        per_insert = config.novelty_samples_per_insert
        table = replay.Table(
            name=TABLE,
            sampler=replay.selectors.Uniform(),
            remover=replay.selectors.Fifo(),
            max_size=config.max_replay_size,
            rate_limiter=replay.rate_limiters.SampleToInsertRatio(
                per_insert, size, config.insert_burst * per_insert + size
            ),
        )
        return [*super().make_tables(spec), table]

    def make_adder(self, client: replay.Client, spec: EnvironmentSpec) -> adders.Adder:
        return adders.NStepTransitionAdder(
            client,
            self.config.n_step,
            self.config.discount,
            priority_fns={adders.REPLAY_TABLE: None, TABLE: None},  # Rows are stored once.
            max_in_flight_items=self.config.insert_burst,
        )

    def make_learner(self, networks: RNDNetworks, spec: EnvironmentSpec) -> core.Learner:
        if self.clients:  # There are none where a checkpoint is loaded to evaluate it.
            source = self.clients[TABLE]
            self._novelty = VariableClient(source, nn.ModuleDict({TABLE: networks.novelty}), update_period=10)
        return super().make_learner(networks, spec)

    def loss(self, networks: RNDNetworks, batch: replay.ReplaySample, context: LossContext) -> LossOutput:
        self._novelty.update()
        novelty = networks.novelty(batch.data.next_observation)
        reward = batch.data.reward + self.config.novelty_coefficient * novelty
        output = super().loss(networks, batch._replace(data=batch.data._replace(reward=reward)), context)
        return output._replace(metrics={**output.metrics, TABLE: novelty.mean()})


def main(
    agent: DQN, max_env_steps: int = 16_000, seed: int = 1, engine: str = "serial", **options: Any
) -> Any:
    config = RunConfig(
        envs_per_actor=4, max_env_steps=max_env_steps, evaluate_period=16_000, seed=seed, **options
    )
    return launch.launch(make_program(agent, Corridor, config), engine=engine)


SETTINGS: dict[str, Any] = {
    "n_step": 3,
    "epsilon_decay": 2_000,
    "hidden_sizes": (64,),
    "min_replay_size": 500,
}

if __name__ == "__main__":
    for agent in (DQN(DQNConfig(**SETTINGS)), RND(RNDConfig(**SETTINGS))):
        print(f"{type(agent).__name__}: greedy return {main(agent)['episode_return']:.2f}")
