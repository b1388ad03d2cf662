"""IMPALA learns in whole programs: what it sees, and what it must remember."""

import functools

import numpy as np
import pytest

import launch
from agents.impala import IMPALA, IMPALAConfig
from framework.environments.testing import MemoryEnvironment
from framework.programs import make_program

CONFIG = {
    "optimizer": "adam",
    "learning_rate": 1e-2,
    "hidden_sizes": (16,),
    "unroll_length": 8,
    "batch_size": 8,
    "discount": 0.95,
    "value_cost": 0.5,
}
# Length of the task, steps, what is added to the config, and the greedy mean return: least and most.
# Of two cues and no memory, a policy that always names the same is right every second time.
CASES = {
    "what it sees": (1, 4_000, {"optimizer": "rmsprop", "learning_rate": 5e-3}, 0.95, 1.0),
    "what it must remember": (4, 12_000, {"lstm_size": 16}, 0.95, 1.0),
    "what it cannot remember": (4, 4_000, {}, 0.2, 0.8),
}


@pytest.mark.parametrize("case", CASES)
def test_impala_learns(case):
    length, steps, changes, least, most = CASES[case]
    rows = []
    program = make_program(
        IMPALA(IMPALAConfig(**{**CONFIG, **changes})),
        functools.partial(MemoryEnvironment, length=length),
        num_actors=2,
        lanes_per_actor=4,
        max_actor_steps=steps,
        evaluate_every=steps,
        num_evaluation_episodes=100,
        publish_every=1,
        update_period=1,
        learner_log_every=50,
        on_write=lambda snapshot: rows.append(snapshot["labels"].get("learner")),
    )
    result = launch.launch(program, engine="serial")
    assert least <= result["episode_return"] <= most
    # Each row of experience was learned from once, but for what was under way at the end.
    learned = result["learner_steps"] * CONFIG["batch_size"] * CONFIG["unroll_length"]
    assert 0.85 * steps < learned < 1.2 * steps * (length + 1) / length
    last = [row for row in rows if row][-1]
    assert last["times_sampled"] == 1
    assert 0 <= last["staleness"] <= last["staleness_max"] < 10
    assert 0 <= last["rho_clipped"] <= 1 and np.isfinite(last["loss"])
