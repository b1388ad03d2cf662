"""PPO learns Kuhn poker by self-play; prints how far from an equilibrium it is on the way.

    pip install 'repertory[pettingzoo,open-spiel]'
    python examples/kuhn_poker.py [ENV_STEPS] [SEED]

The exploitability (NashConv / 2) is what a best response wins against the policy, as the mean of both seats:
0 in an equilibrium, 0.458 for random moves. OpenSpiel computes it exactly. It is that of the mean of the
policies in the second half of the checkpoints so far, each weighted by the probability with which it reaches
a decision.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pettingzoo
import pyspiel
import torch
from gymnasium import spaces
from open_spiel.python import policy as spiel
from open_spiel.python.algorithms.exploitability import exploitability

import launch
from agents.ppo import PPO, PPOConfig
from framework.checkpoints import Checkpointer
from framework.experiments.self_play import SelfPlay
from framework.programs import RunConfig, load_policy, make_program
from framework.specs import TURN

GAME = pyspiel.load_game("kuhn_poker")


class SelfPlayPPO(SelfPlay, PPO):
    """PPO against itself and 8 earlier versions."""

    num_opponents, opponent_period, past = 8, 20, 0.5


class SpielEnv(pettingzoo.AECEnv):
    """A game of OpenSpiel in turns, whose observations are information states."""

    metadata = {"name": "open_spiel"}

    def __init__(self, game: Any = GAME, seed: int | None = None):
        self._game, self._random = game, np.random.default_rng(seed)
        self.possible_agents = [f"player_{index}" for index in range(game.num_players())]

    def observation_space(self, agent: str) -> spaces.Space:
        size, count = self._game.information_state_tensor_size(), self._game.num_distinct_actions()
        return spaces.Dict(
            observation=spaces.Box(0, 1, (size,), np.float32), action_mask=spaces.MultiBinary(count)
        )

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(self._game.num_distinct_actions())

    def observe(self, agent: str) -> dict[str, np.ndarray]:
        player = self.possible_agents.index(agent)
        return {
            "observation": np.array(self._state.information_state_tensor(player), np.float32),
            "action_mask": np.array(self._state.legal_actions_mask(player), np.int8),
        }

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents, self._state = [*self.possible_agents], self._game.new_initial_state()
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self._update()

    def step(self, action: int | None) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self._state.apply_action(int(action))  # type: ignore[arg-type]
        self._update()

    def _update(self) -> None:
        while self._state.is_chance_node():
            actions, probabilities = zip(*self._state.chance_outcomes(), strict=True)
            self._state.apply_action(int(self._random.choice(actions, p=probabilities)))
        over = self._state.is_terminal()
        self.rewards = dict(zip(self.agents, self._state.rewards(), strict=True))
        self.terminations = dict.fromkeys(self.agents, over)
        self.agent_selection = self.agents[0 if over else self._state.current_player()]


def config(env_steps: int) -> PPOConfig:
    return PPOConfig(
        hidden_sizes=(32, 32),
        unroll_length=16,
        epochs=4,
        minibatch_size=512,
        discount=1.0,
        learning_rate=5e-3,
        learning_rate_decay=env_steps,
        learning_rate_end=0.1,
        normalize_advantages=False,
        normalize_observations=False,
        # Much at first: a probability that gets very small does not come back. Less in the end: with 0.1 all
        # along, the policy rests 0.15 from an equilibrium (Sokota et al., 2022, anneal a temperature alike).
        entropy_coefficient=0.3,
        entropy_end=0.05,
    )


def probabilities(networks: Any) -> np.ndarray:
    """`[12, 2]`: the probabilities of the actions at each information state of OpenSpiel's tables."""
    states = spiel.TabularPolicy(GAME).states
    observation = {
        "observation": torch.tensor([each.information_state_tensor() for each in states]),
        "action_mask": torch.tensor([each.legal_actions_mask() for each in states], dtype=torch.int8),
        TURN: torch.ones(len(states), dtype=torch.int64),
    }
    with torch.no_grad():
        distribution, _ = networks.act(networks.normalizer(observation), ())
        chances = [distribution.log_prob(torch.full((len(states),), action)).exp() for action in range(2)]
    return torch.stack(chances, 1).double().numpy()


def mean_policy(tables: Sequence[np.ndarray]) -> spiel.TabularPolicy:
    """The mean of policies, weighted by the probabilities with which each of them reaches a decision.

    Against any opponent it wins what a player wins who draws one of the policies for each game (Kuhn, 1953).

    Args:
      tables: the `probabilities` of each policy.
    """
    mean = spiel.TabularPolicy(GAME)
    mean.action_probability_array[:] = 0.0

    def visit(state: Any, reach: np.ndarray, table: np.ndarray) -> None:
        """`reach`: the probability of each player's own actions so far."""
        if state.is_terminal():
            return
        if state.is_chance_node():
            for action, _ in state.chance_outcomes():
                visit(state.child(action), reach, table)
            return
        player, row = state.current_player(), mean.state_lookup[state.information_state_string()]
        mean.action_probability_array[row] += reach[player] * table[row]
        for action in state.legal_actions():
            after = reach.copy()
            after[player] *= table[row, action]
            visit(state.child(action), after, table)

    for table in tables:
        visit(GAME.new_initial_state(), np.ones(2), table)
    mean.action_probability_array /= mean.action_probability_array.sum(1, keepdims=True)
    return mean


def main(env_steps: int = 120_000, seed: int = 1) -> list[tuple[int, float]]:
    """Returns pairs of env steps and exploitability."""
    with tempfile.TemporaryDirectory() as directory:
        run = RunConfig(
            directory=directory,
            envs_per_actor=64,
            max_env_steps=env_steps,
            evaluate_period=None,
            checkpoint_period=env_steps // 100,
            checkpoint_minutes=None,
            keep_checkpoints=200,
            seed=seed,
        )
        launch.launch(make_program(SelfPlayPPO(config(env_steps)), SpielEnv, run), engine="serial")
        folders = Checkpointer(f"{directory}/checkpoints").checkpoints()
        loaded = [load_policy(directory, folder, allow=("kuhn_poker", "examples")) for folder in folders]
    tables, curve = [probabilities(each.networks) for each in loaded], []
    for index in np.linspace(0, len(tables) - 1, 11).astype(int)[1:]:
        mean = exploitability(GAME, mean_policy(tables[index // 2 : index + 1]))
        newest = exploitability(GAME, mean_policy([tables[index]]))
        curve.append((loaded[index].step, float(mean)))
        print(f"{curve[-1][0]:,} env steps: exploitability {mean:.3f}, of the newest {newest:.3f}")
    return curve


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
