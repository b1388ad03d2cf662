"""The nightly suite: which rows it has, what it makes of a run, and its table."""

import dataclasses
import json
import subprocess
import sys
from importlib import metadata

import pytest
import warm_python

from framework.runs.registry import GROUP
from results import learning, nightly
from results.rows import PLANS


def test_it_has_every_agent_with_a_floor_in_its_environments_once_and_more_rows():
    rows = nightly.rows()
    once = [row for name, row in rows.items() if name not in nightly.MORE_ROWS]
    agents = [row.agent for row in once]
    assert {"dqn", "impala", "ppo", "sac"} <= set(agents) and len(set(agents)) == len(agents)
    assert all(row.environment in nightly.ENVIRONMENTS for row in once)
    assert set(nightly.MORE_ROWS) <= set(rows)
    named = {entry.name for entry in metadata.entry_points(group=GROUP)} - {"random_actions"}
    named -= {"bc", "cql", "edac", "iql", "rebrac", "rlpd", "td3_bc"}  # They learn from files.
    named -= {"keras_dqn", "keras_ppo"}  # Their formulas are those of `dqn` and `ppo`.
    named -= {"mappo"}  # Its rows stand beside each other.
    assert {row.agent for row in rows.values()} == named | {*PLANS.values()}
    for name, row in rows.items():
        assert row.floor is not None, name
        assert nightly.envs_of(row)[0] >= 2, f"{name} needs two actors"


@pytest.fixture
def warm(monkeypatch):
    started = subprocess.run

    def run(command, **options):
        if command[0] == sys.executable:
            return warm_python.run(command[1:], **options)
        return started(command, **options)

    monkeypatch.setattr(nightly.subprocess, "run", run)


def test_a_short_real_run_and_a_refused_one(tmp_path, monkeypatch, warm):
    for name, agent, floor in (("cartpole-dqn", "dqn", 0.0), ("cartpole-a2c", "a2c", 501.0)):
        row = dataclasses.replace(learning.ROWS[name], agent=agent, steps=1500, floor=floor)
        monkeypatch.setitem(learning.ROWS, name, row)
    assert nightly.make_row("cartpole-dqn", ["processes"], [1], tmp_path, {}) == 0
    assert nightly.make_row("cartpole-a2c", ["served"], [1], tmp_path, {}) == 0
    (run,) = json.loads((tmp_path / "cartpole-dqn.json").read_text())["runs"]["processes"]
    assert 8 <= run["return"] <= 500 and run["staleness"] >= 0 and run["learner_steps"] > 0
    assert (
        run["evaluation_seeds"] == [10_000, 10_099]
        and run["date"]
        and {"python", "torch"} <= {*run["versions"]}
    )
    (refused,) = json.loads((tmp_path / "cartpole-a2c.json").read_text())["runs"]["served"]
    assert "inference: got 'server'" in refused["refused"]
    table = nightly.table(tmp_path, ["cartpole-dqn", "cartpole-a2c"])
    assert "| cartpole-a2c | served | ≥ 501 | refused |" in table
    assert f"| {run['samples_per_insert']:.2f} |" in table and "| 1 of 1 |" in table


def test_a_run_below_its_floor_is_counted_and_not_made_again(tmp_path):
    runs = [{"seed": 1, "return": 300.0}, {"seed": 2, "return": 500.0}, {"seed": 3, "refused": "no"}]
    (tmp_path / "cartpole-dqn.json").write_text(json.dumps({"runs": {"ray": runs}}))
    assert nightly.make_row("cartpole-dqn", ["ray"], [1, 2, 3], tmp_path, {"ray": "no such python"}) == 1


def test_a_run_without_the_gain_that_its_row_asks_is_counted(tmp_path):
    runs = [{"seed": seed, "return": -18.0, "before": before} for seed, before in ((1, -40.0), (2, -25.0))]
    (tmp_path / "navigation-maml.json").write_text(json.dumps({"runs": {"processes": runs}}))
    assert nightly.make_row("navigation-maml", ["processes"], [1, 2], tmp_path, {}) == 1
