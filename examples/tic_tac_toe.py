"""PPO learns tic-tac-toe by self-play, and then plays against random moves and against minimax.

    pip install 'repertory[pettingzoo]'
    python examples/tic_tac_toe.py [ENV_STEPS] [SEED]

A draw is the best result against minimax, which takes one of its best moves at random.
"""

from __future__ import annotations

import functools
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable

import numpy as np

import launch
from agents.ppo import PPO, PPOConfig
from framework import environments
from framework.environments import LAST
from framework.experiments.self_play import SelfPlay
from framework.programs import LoadedPolicy, RunConfig, load_policy, make_program

ENVIRONMENT = "pettingzoo:classic.tictactoe_v3"
LINES = [0o7, 0o70, 0o700, 0o111, 0o222, 0o444, 0o421, 0o124]  # Cell i is bit i.

Opponent = Callable[[int, int], int]  # From the cells of both players, its own first, to a cell.


class SelfPlayPPO(SelfPlay, PPO):
    """PPO against itself and 16 earlier versions."""

    num_opponents, opponent_period, past = 16, 5, 0.5


def config(env_steps: int) -> PPOConfig:
    return PPOConfig(
        hidden_sizes=(128, 128),
        activation="relu",
        inputs=("observation/observation=numbers",),
        unroll_length=32,
        epochs=4,
        minibatch_size=256,
        discount=1.0,  # A late win is as good as an early one.
        learning_rate=3e-3,
        learning_rate_decay=env_steps,
        learning_rate_end=0.1,
        normalize_advantages=False,
        # Much at first: with 0.03, the policy is nearly certain of its moves before it has learned to block.
        # Some in the end: opponents begin in all cells that are no worse, and the second player sees them.
        entropy_coefficient=0.2,
        entropy_end=0.2,
    )


def moves(board: int) -> list[int]:
    return [cell for cell in range(9) if not board >> cell & 1]


@functools.cache
def value(own: int, other: int) -> int:
    """1 if the player whose turn it is wins, 0 for a draw, -1 if it loses, when both play their best."""
    if any(other & line == line for line in LINES):
        return -1
    return max((-value(other, own | 1 << cell) for cell in moves(own | other)), default=0)


def minimax(own: int, other: int) -> int:
    values = {cell: -value(other, own | 1 << cell) for cell in moves(own | other)}
    return random.choice([cell for cell in values if values[cell] == max(values.values())])


def any_move(own: int, other: int) -> int:
    return random.choice(moves(own | other))


def play(policy: LoadedPolicy, opponent: Opponent, games: int) -> Counter[tuple[str, int]]:
    """Plays games, as many in each seat; counts the results by seat (`first`, `second`) and reward."""
    results: Counter[tuple[str, int]] = Counter()
    with environments.make(ENVIRONMENT, num_envs=games, seed=1) as environment:
        timestep, over = environment.reset(), np.zeros(games, bool)
        names = list(timestep.observation)
        while not over.all():
            actions = policy(timestep.observation)
            for game in range(games):  # The policy's seat is this number modulo 2.
                name = names[1 - game % 2]
                planes = timestep.observation[name]["observation"][game].transpose(2, 0, 1).reshape(2, 9)
                own, other = (int(sum(1 << cell for cell in np.flatnonzero(plane))) for plane in planes)
                if moves(own | other):
                    actions[name][game] = opponent(own, other)
            timestep = environment.step(actions)
            ended = timestep.step_type == LAST
            for game in np.flatnonzero(ended & ~over):
                reward = int(timestep.reward[names[game % 2]][game])
                results["second" if game % 2 else "first", reward] += 1
            over |= ended
    return results


def main(env_steps: int = 320_000, seed: int = 1, games: int = 1_000) -> dict[str, Counter[tuple[str, int]]]:
    with tempfile.TemporaryDirectory() as directory:
        run = RunConfig(
            directory=directory,
            envs_per_actor=128,
            max_env_steps=env_steps,
            evaluate_period=env_steps // 4,
            num_evaluation_episodes=100,
            seed=seed,
        )
        program = make_program(SelfPlayPPO(config(env_steps)), ENVIRONMENT, run)
        launch.launch(program, engine="serial")
        policy = load_policy(directory, allow=("tic_tac_toe", "examples"))
    random.seed(seed)
    return {"random": play(policy, any_move, games), "minimax": play(policy, minimax, 200)}


if __name__ == "__main__":
    for name, results in main(*map(int, sys.argv[1:])).items():
        for seat in ("first", "second"):
            won, drawn, lost = (results[seat, reward] for reward in (1, 0, -1))
            print(f"{seat} against {name}: {won} won, {drawn} drawn, {lost} lost")
