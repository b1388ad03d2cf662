"""Hindsight experience replay (Andrychowicz et al., 2017): a node that reads one table and writes another.

    python examples/hindsight.py

An episode flips one of 10 bits a step, from a random state, and is rewarded only if the state becomes a
random goal. Actors write whole episodes to a queue. The node takes each once and writes its transitions to
the table of DQN's learner, and again as if the goal had been the state in which the episode ended:

```text
actors ─▶ queue "episodes" ─▶ hindsight ─▶ table "replay" ─▶ learner ─▶ actors, evaluator
```

After 40,000 steps DQN alone reaches no goal, and with the node 13 of 20 (a minute for both). Where
observations show goals, agents do the same in the adder: see `hindsight_goals`.
"""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np
from dm_env import specs as dm_specs

import launch
from agents.dqn import DQN, DQNConfig
from framework import adders, core, replay
from framework.datasets import Dataset
from framework.programs import RunConfig, make_program
from framework.replay.contracts import ReplayClient
from framework.specs import EnvironmentSpec
from framework.types import Step

EPISODES = "episodes"
BITS = 10


class BitFlipping(dm_env.Environment):
    """Action i flips bit i. Observations float32 `[2 * BITS]` are the state and the goal."""

    def __init__(self, seed: int = 0):
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def observation_spec(self) -> dm_specs.Array:
        return dm_specs.Array((2 * BITS,), np.float32)

    def action_spec(self) -> dm_specs.DiscreteArray:
        return dm_specs.DiscreteArray(BITS)

    def reset(self) -> dm_env.TimeStep:
        self._bits = self._random.integers(2, size=2 * BITS).astype(np.float32)
        self._left = BITS
        return dm_env.restart(self._bits.copy())

    def step(self, action: Any) -> dm_env.TimeStep:
        self._bits[action] = 1 - self._bits[action]
        self._left -= 1
        return outcome(self._bits.copy(), last=self._left == 0)


def outcome(observation: np.ndarray, last: bool) -> dm_env.TimeStep:
    """The time step that leads to `observation`, the last of its episode at the latest."""
    if np.array_equal(observation[:BITS], observation[BITS:]):
        return dm_env.termination(1.0, observation)
    return (dm_env.truncation if last else dm_env.transition)(0.0, observation)


class Hindsight(core.Worker):
    """Writes the transitions of each episode, and again with the goal that it reached.

    Args:
      agent: makes the adder of transitions.
      spec: the spec of one env.
      replay: the replay client, which reads the episodes and takes the transitions.
    """

    def __init__(self, agent: HindsightDQN, spec: EnvironmentSpec, *, replay: Any):
        self._replay = replay
        self._episodes = Dataset(replay, EPISODES, 1)
        self._adder = agent.transition_adder(replay, spec)
        self._finished = False

    def finished(self) -> bool:
        return self._finished

    def ready(self) -> bool:
        """Whether there are an episode and room; the items of one episode may wait in the adder."""
        return self._replay.can_insert(adders.REPLAY_TABLE) and self._episodes.ready()

    def step(self) -> None:
        sample = next(self._episodes, None)
        if sample is None:
            self._finished = True  # The program is being stopped.
            return
        data: Step = sample.data  # Leaves [1, T + 1, ...]; the last row has no action.
        observations, actions = np.array(data.observation[0]), np.array(data.action[0])[:-1]
        self._write(observations, actions)
        observations[:, BITS:] = observations[-1, :BITS]
        self._write(observations, actions)

    def _write(self, observations: np.ndarray, actions: np.ndarray) -> None:
        """Writes the episode up to the step that reaches its goal."""
        self._adder.add_first(dm_env.restart(observations[0]))
        for t, action in enumerate(actions, start=1):
            timestep = outcome(observations[t], last=t == len(actions))
            self._adder.add(action, timestep)
            if timestep.last():
                break

    def close(self) -> None:
        self._episodes.close()
        self._adder.close()


class HindsightDQN(DQN):
    """DQN whose actors write episodes, and whose learner reads what `Hindsight` makes of them."""

    def make_tables(self, spec: EnvironmentSpec) -> list[replay.Table]:
        return [*super().make_tables(spec), replay.Table.queue(EPISODES, 100)]

    def make_adder(self, client: ReplayClient, spec: EnvironmentSpec) -> adders.Adder:
        return adders.EpisodeAdder(client, BITS + 1, priority_fns={EPISODES: None}, max_in_flight_items=100)

    def transition_adder(self, client: ReplayClient, spec: EnvironmentSpec) -> adders.Adder:
        return super().make_adder(client, spec)

    def build(self, graph: core.Graph) -> None:
        server = graph.add_replay()
        learner = graph.add_learner(server)
        graph.add_actors(server, learner)
        graph.add_evaluator(learner)
        graph.add_node("hindsight", launch.CourierNode(Hindsight, self, graph.spec, replay=server))


def main(agent: DQN, max_env_steps: int = 40_000, engine: str = "serial") -> Any:
    config = RunConfig(envs_per_actor=8, max_env_steps=max_env_steps, evaluate_period=max_env_steps, seed=1)
    return launch.launch(make_program(agent, BitFlipping, config), engine=engine)


SETTINGS: dict[str, Any] = {"hidden_sizes": (256,), "epsilon_decay": 10_000, "epsilon_end": 0.1}

if __name__ == "__main__":
    for agent in (DQN(DQNConfig(**SETTINGS)), HindsightDQN(DQNConfig(**SETTINGS))):
        print(f"{type(agent).__name__}: greedy return {main(agent)['episode_return']:.2f}")
