"""A program of an agent without torch: nothing in the graph needs to know what computes the parameters.

That such a run continues bit for bit is in test_snapshot.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.numpy_agent import Linear

import launch
from agents.random_actions import RandomActionsConfig
from framework.checkpoints import Checkpointer
from framework.programs import RunConfig, load_policy, make_program
from framework.runs import initial

CARTPOLE = "gymnasium:CartPole-v1"
# The limiter lets actors be about 550 steps ahead of the learner.
CONFIG = RunConfig(envs_per_actor=2, max_env_steps=1600, evaluate_period=800, num_evaluation_episodes=1)
AGENT = Linear(RandomActionsConfig(batch_size=16))


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("serial", {"variable_sources": 1, "inference": "server"}),
        ("processes", {}),
        ("processes", {"variable_sources": 1, "inference": "alternating+server"}),
    ],
    ids=["serial", "processes", "served"],
)
def test_what_the_learner_publishes_acts_is_saved_and_begins_other_runs(tmp_path, engine, settings):
    config = dataclasses.replace(CONFIG, directory=str(tmp_path), **settings)
    assert launch.launch(make_program(AGENT, CARTPOLE, config), engine)["variables_version"] > 0
    state = Checkpointer(tmp_path / "checkpoints").restore().state
    saved, best = state("learner")["learner"]["networks"], state("best")["networks"]
    assert sorted(best) == ["policy.bias", "policy.weight"] and best["policy.bias"].all()
    newest, greedy = (load_policy(config.directory, which, allow=("helpers",)) for which in (None, "best"))
    begun = AGENT.make_networks(newest.spec)
    initial.load(config.directory, begun)
    for name, entry in (("policy", "weight"), ("policy", "bias"), ("errors", "mean")):
        for networks in (newest.networks, begun):
            np.testing.assert_array_equal(networks[name][entry], saved[f"{name}.{entry}"])
        kept = best.get(f"{name}.{entry}", 0.0)  # The evaluator keeps what acts.
        np.testing.assert_array_equal(greedy.networks[name][entry], kept)
    np.testing.assert_array_equal(newest._policy._placed["bias"], saved["policy.bias"])
