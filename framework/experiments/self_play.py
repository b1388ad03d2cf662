"""Self-play: an agent learns a game against itself, and against frozen copies of what it was.

```python
class SelfPlayPPO(SelfPlay, PPO):
    num_opponents = 16

program = make_program(SelfPlayPPO(), "pettingzoo:classic.tictactoe_v3", RunConfig(envs_per_actor=16))
```

Env b of an actor learns in seat b modulo the number of seats; opponents play the others. An actor keeps the
pool of its opponents:

```text
learner steps     0      100      200      300      400
pool             [0]  [0 100] [0 100 200]   …                     a random one makes room when it is full
opponent of an    newest, or with probability `past` one of the pool
episode
```
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import dm_env
import numpy as np
import tree

from framework import adders, core, specs
from framework.multi_agent import AgentGroup, group_agents
from framework.replay import Table
from framework.torch_agents import TorchAgent
from framework.types import MultiAgentTimeStep, Nest

_NEWEST, _RANDOM = -1, -2  # Opponents that are not in the pool.


class SelfPlayPolicy(core.Policy):
    """Acts for all seats of B envs. The extras come from the seats that learn.

    Args:
      group: the seats.
      policy: acts with the newest parameters.
      opponents: frozen copies of the policy, with which the pool is filled. Empty: the others make random
        legal moves.
      period: learner steps between two copies.
      past: probability with which an opponent is one of the pool.
    """

    def __init__(self, group: AgentGroup, policy: Any, opponents: list[Any], period: int, past: float):
        self._group, self._policy, self._opponents = group, policy, opponents
        self._period, self._past = period, past
        self.variables, self._size, self._due = policy.variables, 0, 0
        self._random = np.random.default_rng(0)
        if tree.flatten(policy.initial_state(1)):
            raise ValueError("SelfPlay: got networks with a memory, expected none. Use an agent without one.")

    def loaded(self, progress: core.Progress) -> None:
        super().loaded(progress)
        self._policy.loaded(progress)
        if progress.version >= self._due and self._opponents:
            self._due = progress.version + self._period
            full = self._size == len(self._opponents)
            place = int(self._random.integers(self._size)) if full else self._size
            self._opponents[place].networks.load_state_dict(self._policy.networks.state_dict())
            self._opponents[place].loaded(progress)
            self._size = max(self._size, place + 1)

    def initial_state(self, batch_size: int) -> Nest:
        """int64`[B, seats]`: the seat that learns, and random opponents, which `step` replaces by drawn ones.

        It does not draw them here, since an inference server has one initial state for all episodes.
        """
        state = np.full((batch_size, len(self._group.agents)), _RANDOM)
        state[:, 0] = np.arange(batch_size) % state.shape[1]
        return state

    def _drawn(self, state: np.ndarray) -> np.ndarray:
        past = (self._random.random(state.shape) < self._past) & (self._size > 0)
        drawn = np.where(past, self._random.integers(max(self._size, 1), size=state.shape), _NEWEST)
        return np.where(state == _RANDOM, drawn, state)

    def step(self, observation: Nest, state: Nest) -> tuple[Nest, Nest, Nest]:
        if self._opponents and (state == _RANDOM).any():
            state = self._drawn(state)
        seats, rows = state.shape[1], self._group.of_envs(self._group.rows(observation))
        own, extras, _ = self._policy.step(_of_seats(rows, state[:, 0]), ())
        actions = np.repeat(own[:, None], seats, axis=1)  # The opponents' moves replace theirs.
        for place in range(1, seats):
            for opponent in np.unique(state[:, place]):
                envs = np.flatnonzero(state[:, place] == opponent)
                at = envs, (state[envs, 0] + place) % seats
                actions[at] = self._moves(opponent, tree.map_structure(operator.itemgetter(at), rows))
        return self._group.split(actions.reshape(-1)), extras, state

    def _moves(self, opponent: int, observation: Nest) -> Any:
        if opponent == _RANDOM:
            mask = specs.action_mask(observation)
            if mask is None:  # All moves are legal.
                mask = np.ones((len(tree.flatten(observation)[0]), self._group.spec.actions.num_values))
            return ((mask > 0) * self._random.uniform(0.5, 1.0, mask.shape)).argmax(-1)
        policy = self._policy if opponent == _NEWEST else self._opponents[opponent]
        return policy.step(observation, ())[0]

    def seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        for index, policy in enumerate((self._policy, *self._opponents)):
            policy.seed(seed + index)

    def save(self) -> Any:
        return self._policy.save(), self._random.bit_generator.state

    def restore(self, state: Any) -> None:
        own, self._random.bit_generator.state = state
        self._policy.restore(own)


class SeatAdder(adders.ForkingAdder):
    """Gives an adder the rows of the seats that learn, one of each env."""

    def __init__(self, group: AgentGroup, adder: adders.Adder):
        super().__init__([adder])
        self._group, self._adder = group, adder

    def add_first(self, timestep: MultiAgentTimeStep) -> None:
        if (count := len(timestep.step_type)) % (seats := len(self._group.agents)):
            raise ValueError(
                f"envs_per_actor: got {count}, expected a multiple of {seats}: env b of an actor learns in "
                f"seat b modulo {seats}."
            )
        self._adder.add_first(self._rows(timestep))

    def add(self, action: Nest, next_timestep: MultiAgentTimeStep, extras: Nest = ()) -> None:
        own = self._group.of_envs(self._group.rows(action))
        self._adder.add(self._learning(own), self._rows(next_timestep), extras)

    def _rows(self, timestep: MultiAgentTimeStep) -> dm_env.TimeStep:
        return self._learning(self._group.of_envs(self._group.timestep(timestep)))

    def _learning(self, rows: Nest) -> Any:
        count = len(tree.flatten(rows)[0])
        return _of_seats(rows, np.arange(count) % len(self._group.agents))


class SelfPlay(TorchAgent):
    """The first base of an agent that learns to play all seats of a game by itself; see `SelfPlayPolicy`.

    The other base is an agent for discrete actions whose networks have no memory, and which takes action
    masks if the game has them. All seats have equal specs. Evaluations play against random legal moves, and
    their return is the agent's.

    Attributes:
      num_opponents: size of an actor's pool.
      opponent_period: learner steps between two copies for the pool.
      past: probability with which the opponent of an episode is one of the pool, and not the newest.
    """

    num_opponents: int = 8
    opponent_period: int = 50
    past: float = 0.5

    def _group(self, spec: specs.EnvironmentSpec) -> AgentGroup:
        return group_agents(spec, lambda _: "player")["player"]

    def make_networks(self, spec: specs.EnvironmentSpec) -> Any:
        group = self._group(spec)
        networks = super().make_networks(group.spec)  # type: ignore[safe-super]
        networks.seats = group
        return networks

    def make_policy(self, networks: Any, evaluation: bool = False) -> core.Policy:
        make = super().make_policy  # type: ignore[safe-super]
        copies = [] if evaluation else [copy.deepcopy(networks) for _ in range(self.num_opponents)]
        own, opponents = make(networks, evaluation), [make(each) for each in copies]
        return SelfPlayPolicy(networks.seats, own, opponents, self.opponent_period, self.past)

    def make_tables(self, spec: specs.EnvironmentSpec) -> list[Table]:
        return super().make_tables(self._group(spec).spec)  # type: ignore[safe-super]

    def make_adder(self, client: Any, spec: specs.EnvironmentSpec) -> adders.Adder:
        group = self._group(spec)
        return SeatAdder(group, super().make_adder(client, group.spec))  # type: ignore[safe-super]

    def make_learner(self, networks: Any, spec: specs.EnvironmentSpec) -> core.Learner:
        return super().make_learner(networks, self._group(spec).spec)

    def describe_inputs(self, spec: specs.EnvironmentSpec) -> list[str]:
        return super().describe_inputs(self._group(spec).spec)

    def play(self, loop: Any, policy: core.Policy, num_episodes: int) -> dict[str, Any]:
        played = loop.run_episodes(num_episodes)
        returns = played["episode_return"]
        names, own = sorted(returns), played["env"] % len(returns)
        played["episode_return"] = np.choose(own, [returns[name] for name in names])
        return played


def _of_seats(rows: Nest, seats: np.ndarray) -> Any:
    """The rows `[B, ...]` of the seats `[B]`, of `[B, seats, ...]`."""
    return tree.map_structure(lambda leaf: leaf[np.arange(len(seats)), seats], rows)
