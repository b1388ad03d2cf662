"""A population trains on every engine, and goes on where it was."""

from __future__ import annotations

import functools

import numpy as np

import launch
from agents.a2c import A2C, A2CConfig
from framework.environments.testing import FakeEnvironment
from framework.experiments.population import make_population
from framework.loggers import read_jsonl
from framework.programs import RunConfig
from framework.runs.checkpoints import newest_checkpoint

FAKE = functools.partial(FakeEnvironment, episode_length=7)
AGENT = A2C(A2CConfig(hidden_sizes=(4,), unroll_length=5))


def test_a_population_goes_on_where_it_was(tmp_path, program_engine):
    for limit in (50, 100):
        config = RunConfig(
            envs_per_actor=2,
            max_env_steps=limit,
            evaluate_period=50,
            num_evaluation_episodes=2,
            directory=str(tmp_path),
        )
        program = make_population(AGENT, FAKE, {"learning_rate": (1e-4, 1e-2)}, config, members=3, copies=1)
        results = launch.launch(program, program_engine)
        assert len(results) == 3 and all(np.isfinite(result["score"]) for result in results)
        reader = newest_checkpoint(config)
        assert reader.step == limit
        for index, result in enumerate(results):
            assert reader.state(f"member-{index}", "learner", "env_steps") == limit
            assert reader.state(f"member-{index}", "settings") == result["settings"]
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [row["env_steps"] for row in rows] == [50] * 3 + [100] * 3
    assert sum("copied" in row for row in rows) == 2
    first = sorted(row["learning_rate"] for row in rows[:3] if "copied" not in row)
    assert {*np.round(first, 6)} < {1e-4, 1e-3, 1e-2}  # Evenly spread at first.
