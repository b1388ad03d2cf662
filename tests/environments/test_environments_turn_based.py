"""Games in turns: PettingZoo's AEC API, with masks for those who wait."""

import numpy as np
import pytest
from gymnasium import spaces

from framework import environments, specs
from framework.environments import FIRST, LAST, MID
from framework.types import MultiAgentTimeStep

pettingzoo = pytest.importorskip("pettingzoo")

TICTACTOE = "pettingzoo:classic.tictactoe_v3"
# The moves of player_1, who wins in the first row, and of player_2.
MOVES = [0, 1, 3, 4, 6]


def test_a_game_of_tictactoe():
    with environments.make(TICTACTOE, num_envs=2, seed=1) as environment:
        assert specs.agents(environment.spec) == ("player_1", "player_2")
        timestep = environment.reset()
        assert isinstance(timestep, MultiAgentTimeStep)
        for ply, move in enumerate(MOVES):
            assert timestep.step_type.tolist() == [FIRST if ply == 0 else MID] * 2
            mover, waits = ("player_1", "player_2") if ply % 2 == 0 else ("player_2", "player_1")
            legal = timestep.observation[mover]["action_mask"]
            assert [np.flatnonzero(mask).tolist() for mask in legal] == [
                [cell for cell in range(9) if cell not in MOVES[:ply]]
            ] * 2
            assert timestep.observation[waits]["action_mask"].tolist() == [[1] + [0] * 8] * 2
            assert [timestep.observation[name]["turn"].tolist() for name in (mover, waits)] == [
                [1, 1],
                [0, 0],
            ]
            # The move of the one who waits is ignored, even to a taken cell.
            timestep = environment.step({mover: np.full(2, move), waits: np.zeros(2, np.int64)})
        assert timestep.step_type.tolist() == [LAST] * 2
        for name, reward in (("player_1", 1.0), ("player_2", -1.0)):
            assert timestep.reward[name].tolist() == [reward] * 2
            assert timestep.discount[name].tolist() == [0.0] * 2
            assert timestep.agents[name].tolist() == [LAST] * 2
        board = timestep.observation["player_1"]["observation"]
        assert board[0].sum() == len(MOVES)
        again = environment.step({name: np.zeros(2, np.int64) for name in ("player_1", "player_2")})
        assert (
            again.step_type.tolist() == [FIRST] * 2 and not again.observation["player_1"]["observation"].any()
        )


def test_the_turn_tells_positions_apart_that_look_alike():
    """After a move of both, the first player to move and the second to wait may see the same pieces."""
    with environments.make(TICTACTOE, num_envs=2, seed=1) as environment:
        environment.reset()
        for moves in ([0, 1], [1, 0]):  # Each env exchanges the cells of the two players.
            timestep = environment.step(dict.fromkeys(("player_1", "player_2"), np.array(moves)))
    first = {name: leaf[0] for name, leaf in timestep.observation["player_1"].items()}
    second = {name: leaf[1] for name, leaf in timestep.observation["player_2"].items()}
    assert (first["observation"] == second["observation"]).all()
    assert (first["turn"], second["turn"]) == (1, 0)


def test_it_passes_the_checks_of_environments():
    assert environments.check_environment(TICTACTOE, num_steps=60) == []


class Countdown(pettingzoo.AECEnv):
    """Three agents say their numbers in turn. `a` leaves after its second; ten moves are the end."""

    metadata = {"name": "countdown"}
    possible_agents = ["a", "b", "c"]

    def observation_space(self, agent):
        return spaces.Box(0, 99, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3, start=1)

    def reset(self, seed=None, options=None):
        self.agents, self.moves, self.total = list(self.possible_agents), 0, 0
        for field in ("rewards", "_cumulative_rewards"):
            setattr(self, field, dict.fromkeys(self.agents, 0.0))
        for field in ("terminations", "truncations"):
            setattr(self, field, dict.fromkeys(self.agents, False))
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = "a"

    def observe(self, agent):
        return np.array([self.total], np.float32)

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert self.action_space(agent).contains(action)
        self.moves, self.total = self.moves + 1, self.total + int(action)
        self.rewards = {each: float(action) if each == agent else 0.0 for each in self.agents}
        following = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        if self.moves == 4:
            self.terminations["a"] = True
        if self.moves == 10:
            self.truncations = dict.fromkeys(self.agents, True)
        self.agent_selection = following
        if self.moves == 4:
            self._deads_step_first()


def test_an_agent_that_leaves_a_game_of_three_waits_for_its_end():
    with environments.make(Countdown, num_envs=1) as environment:
        timestep = environment.reset()
        types = []
        for ply in range(10):
            # Values of the spec count from 0.
            timestep = environment.step({name: np.array([ply % 3]) for name in "abc"})
            types.append({name: int(kind[0]) for name, kind in timestep.agents.items()})
        assert [each["a"] for each in types] == [MID] * 3 + [LAST] + [FIRST] * 6
        assert [each["b"] for each in types] == [MID] * 9 + [LAST]
        assert timestep.step_type.tolist() == [LAST]
        assert {name: float(value[0]) for name, value in timestep.discount.items()} == dict.fromkeys(
            "abc", 1.0
        )
        assert sum(float(value[0]) for value in timestep.reward.values()) == 1 + 9 % 3
        assert timestep.observation["a"].tolist() == [[0.0]]
        assert timestep.observation["b"].tolist() == [[float(sum(1 + ply % 3 for ply in range(10)))]]


def test_what_is_no_environment_is_told_with_all_that_are():
    with pytest.raises(TypeError, match=r"expected a dm_env.Environment, .* or a pettingzoo.AECEnv"):
        environments.make(lambda: object())
