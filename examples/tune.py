"""Tunes PPO on CartPole-v1 with Optuna, which ends trials that are not promising.

    pip install 'repertory[examples]'
    python examples/tune.py [TRIALS]

Each trial is a program on the engine `serial`.
"""

from __future__ import annotations

import sys
from typing import Any

import optuna

import launch
from agents.ppo import PPO, PPOConfig
from framework.programs import Callback, RunConfig, make_program


class Prune(Callback):
    """Reports each evaluation to a trial, and ends the run if the trial is to be pruned."""

    def __init__(self, trial: optuna.Trial):
        self.trial = trial

    def on_evaluation(self, label: str, row: dict[str, Any]) -> None:
        self.trial.report(row["episode_return"], row["env_steps"])
        if self.trial.should_prune():
            raise optuna.TrialPruned


def objective(trial: optuna.Trial, max_env_steps: int = 30_000) -> float:
    agent = PPO(
        PPOConfig(unroll_length=64, learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True))
    )
    config = RunConfig(
        envs_per_actor=8, max_env_steps=max_env_steps, evaluate_period=max_env_steps // 6, seed=1
    )
    program = make_program(agent, "gymnasium:CartPole-v1", config, callbacks=[Prune(trial)])
    result = launch.launch(program, engine="serial")
    return float(result["episode_return"])


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print(f"greedy return {study.best_value:.1f} with {study.best_params}")
