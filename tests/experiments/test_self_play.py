"""Self-play: who plays which seat, the pool of frozen opponents, and the rows that an agent learns from."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import launch
from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from framework import environments, specs
from framework.adders import Adder
from framework.core import Progress
from framework.environments import LAST
from framework.experiments.self_play import SeatAdder, SelfPlay
from framework.loggers import read_jsonl
from framework.programs import RunConfig, load_policy, make_program

pytest.importorskip("pettingzoo")
GAME = "pettingzoo:classic.tictactoe_v3"


class SelfPlayPPO(SelfPlay, PPO):
    num_opponents, opponent_period, past = 2, 10, 1.0


class SelfPlayDQN(SelfPlay, DQN):
    num_opponents, opponent_period = 2, 10


AGENT = SelfPlayPPO(PPOConfig(hidden_sizes=(8,), unroll_length=8, minibatch_size=32, epochs=1))


@functools.cache
def game_spec():
    with environments.make(GAME) as environment:
        return specs.make_environment_spec(environment)


def fill(networks, value):
    with torch.no_grad():
        for parameter in networks.parameters():
            parameter.fill_(value)


def first(networks):
    return next(networks.parameters()).flatten()[0].item()


def opponents_of(policy, envs):
    with environments.make(GAME, num_envs=envs) as environment:
        observation = environment.reset().observation
    return {*policy.step(observation, policy.initial_state(envs))[2][:, 1].tolist()}


def test_the_pool_keeps_what_the_networks_were():
    networks = AGENT.make_networks(game_spec())
    policy = AGENT.make_policy(networks)
    assert opponents_of(policy, 9) == {-1}  # The newest: the pool is empty.
    kept = []
    for version in (0, 4, 10, 20, 29, 30):
        fill(networks, float(version))
        policy.loaded(Progress(version, 8 * version))
        kept.append([first(each.networks) for each in policy._opponents[: policy._size]])
    assert kept[:3] == [[0.0], [0.0], [0.0, 10.0]]
    assert 20.0 in kept[3] and {*kept[3]} < {0.0, 10.0, 20.0}  # One made room.
    assert kept[4] == kept[3] and 30.0 in kept[5]
    assert [each.progress.version for each in policy._opponents] == kept[5]
    assert opponents_of(policy, 200) == {0, 1}  # `past` is 1.


def test_an_episode_draws_its_opponent_in_its_first_step():
    policy = AGENT.make_policy(AGENT.make_networks(game_spec()))
    policy.loaded(Progress(0, 0))
    policy.loaded(Progress(10, 80))
    with environments.make(GAME, num_envs=40) as environment:
        observation = environment.reset().observation
    initial = policy.initial_state(40)  # The only one that an inference server asks for.
    first = policy.step(observation, initial)[2]
    assert {*first[:, 1]} == {0, 1} and first[:, 0].tolist() == [0, 1] * 20
    assert policy.step(observation, first)[2].tolist() == first.tolist()
    again = np.where(np.arange(40)[:, None] < 20, initial, first)  # The first 20 begin an episode.
    second = policy.step(observation, again)[2]
    assert (second[20:] == first[20:]).all() and (second[:20] != first[:20]).any()


def test_an_env_keeps_its_seat_at_any_place_of_a_batch():
    policy = AGENT.make_policy(AGENT.make_networks(game_spec()))
    policy._policy, policy._opponents = Always(0), [Always(1)]
    with environments.make(GAME, num_envs=3) as environment:
        observation = environment.reset().observation
    actions, _, _ = policy.step(observation, np.array([[1, 0], [1, 0], [0, 0]]))
    assert actions["player_1"].tolist() == [1, 1, 0] and actions["player_2"].tolist() == [0, 0, 1]


class Always:
    """Moves to one cell, and counts its rows."""

    variables, rows = (), 0

    def __init__(self, cell):
        self.cell = cell

    def initial_state(self, batch_size):
        return ()

    def step(self, observation, state):
        count = len(observation["action_mask"])
        self.rows += count
        return np.full(count, self.cell), {"row": np.arange(count)}, ()


def test_each_env_learns_in_its_seat_and_its_opponent_plays_the_other():
    policy = AGENT.make_policy(AGENT.make_networks(game_spec()))
    policy._policy, policy._opponents = Always(0), [Always(1), Always(2)]
    with environments.make(GAME, num_envs=4) as environment:
        observation = environment.reset().observation
    state = np.array([[0, -1], [1, 0], [0, 1], [1, 1]])
    actions, extras, _ = policy.step(observation, state)
    assert actions["player_1"].tolist() == [0, 1, 0, 2]
    assert actions["player_2"].tolist() == [0, 0, 2, 0]
    assert extras["row"].tolist() == [0, 1, 2, 3]
    assert (policy._policy.rows, policy._opponents[0].rows, policy._opponents[1].rows) == (5, 1, 2)


def test_opponents_of_an_evaluation_make_random_legal_moves():
    policy = AGENT.make_policy(AGENT.make_networks(game_spec()), evaluation=True)
    policy.seed(1)
    mask = np.array([[0, 1, 0, 0, 1, 0, 0, 0, 1]] * 300, np.int8)
    moves = policy._moves(int(policy.initial_state(1)[0, 1]), {"action_mask": mask})
    assert {*moves.tolist()} == {1, 4, 8} and np.bincount(moves)[[1, 4, 8]].min() > 60


class Kept(Adder):
    close = flush = ready = reset = None

    def __init__(self):
        self.rows = []

    def add_first(self, timestep):
        self.rows.append((None, timestep))

    def add(self, action, next_timestep, extras=()):
        self.rows.append((action, next_timestep))


def test_the_rows_are_those_of_the_seat_that_learns():
    kept = Kept()
    with environments.make(GAME, num_envs=2) as environment:
        adder = SeatAdder(AGENT._group(environment.spec), kept)
        adder.add_first(environment.reset())
        for move in (0, 1, 3, 4, 6):  # The first player wins.
            action = {"player_1": np.full(2, move), "player_2": np.full(2, move)}
            adder.add(action, environment.step(action))
    last_action, last = kept.rows[-1]
    assert last_action.tolist() == [6, 6]
    assert last.step_type.tolist() == [LAST] * 2
    assert last.reward.tolist() == [1.0, -1.0] and last.discount.tolist() == [0.0, 0.0]
    turns = [(row.observation["action_mask"] > 0).sum(-1).tolist() for _, row in kept.rows[:-1]]
    assert turns == [[9, 1], [1, 8], [7, 1], [1, 6], [5, 1]]  # Who waits has one action.
    message = "envs_per_actor: got 3, expected a multiple of 2"
    with environments.make(GAME, num_envs=3) as environment, pytest.raises(ValueError, match=message):
        adder.add_first(environment.reset())


def test_the_return_of_an_evaluation_is_that_of_the_agent():
    class Played:
        def run_episodes(self, count):
            returns = {"player_2": np.array([-1.0, 1.0, 0.0]), "player_1": np.array([1.0, -1.0, 0.0])}
            return {"episode_return": returns, "env": np.array([0, 1, 2])}

    assert AGENT.play(Played(), None, 3)["episode_return"].tolist() == [1.0, 1.0, 0.0]


def test_networks_with_a_memory_are_refused():
    agent = SelfPlayPPO(PPOConfig(recurrent="lstm", recurrent_size=4))
    with pytest.raises(ValueError, match="SelfPlay: got networks with a memory"):
        agent.make_policy(agent.make_networks(game_spec()))


DQN_AGENT = SelfPlayDQN(
    DQNConfig(hidden_sizes=(8,), min_replay_size=40, batch_size=8, samples_per_insert=1.0)
)


@pytest.mark.parametrize("agent", [AGENT, DQN_AGENT], ids=["on-policy", "off-policy"])
def test_a_program_of_self_play(tmp_path, agent):
    config = RunConfig(
        directory=str(tmp_path),
        envs_per_actor=4,
        max_env_steps=320,
        num_evaluation_episodes=10,
        learner_log_period=1,
        log_period=50,
    )
    result = launch.launch(make_program(agent, GAME, config), "serial")
    assert result["env_steps"] == 320 and -1 <= result["episode_return"] <= 1
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    losses = [row["loss"] for row in rows if row["label"] == "learner"]
    assert len(losses) >= 10 and np.isfinite(losses).all()
    policy = load_policy(tmp_path, allow=(__name__,))
    with environments.make(GAME, num_envs=2) as environment:
        actions = policy(environment.reset().observation)
    assert {name: action.shape for name, action in actions.items()} == {"player_1": (2,), "player_2": (2,)}
