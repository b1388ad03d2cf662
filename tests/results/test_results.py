"""The page of results says what the files of results say."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import re
import statistics

import markers
import numpy as np
import pytest

from framework import environments
from results import learning, peers
from results.rows import RECORDS

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_row_with_results_is_shown_on_the_page_of_its_agent_and_on_that_of_all():
    pages = [*ROOT.glob("docs/agents/*.md"), ROOT / "docs" / "results.md"]
    shown = {path.stem: path.read_text(encoding="utf-8") for path in pages}
    for file in RECORDS.glob("**/*.json"):
        agent = json.loads(file.read_text(encoding="utf-8"))["agent"]
        of_data = dict.fromkeys(("bc", "cql", "iql", "rebrac", "td3_bc"), "offline")
        of_sac = dict.fromkeys(("droq", "simba", "simba_v2", "tqc"), "crossq")
        own = {"a3c": "a2c", "impact": "appo", **of_data, **of_sac}.get(agent, agent)
        own = own.rpartition(":")[2].removesuffix("Plan").lower()
        kind, _, of = file.stem.partition("-")
        is_small = kind in ("masked", "tuple") and file.parent == RECORDS  # One line for both of an agent.
        for page in ["results", own] if file.parent == RECORDS else ["results"]:
            assert f"\n| {of if is_small and page == 'results' else file.stem} |" in shown[page]


def test_a_marker_that_has_nothing_to_show_is_an_error():
    class Config:
        a: int = 1

    with pytest.raises(ValueError, match=r"Config.a has no comment"):
        markers.fields_table(dataclasses.dataclass(Config))
    with pytest.raises(ValueError, match=r"no results of \['no-row'\]"):
        markers.made("<!-- table: results.learning no-row -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="no `<!-- end -->`"):
        markers.made("<!-- table: results.learning -->\nText.\n")


@pytest.mark.parametrize("file", sorted(RECORDS.glob("*.json")), ids=lambda file: file.stem)
def test_a_row_names_each_seed_once_and_its_steps(file):
    row = json.loads(file.read_text(encoding="utf-8"))
    seeds = [run["seed"] for run in row["runs"]]
    assert seeds and len(set(seeds)) == len(seeds)
    assert all(run["steps"] == row["steps"] and run["commit"] for run in row["runs"])
    # A row is of one kind of first states, so that its mean means something.
    for runs in (row["runs"], *row["peers"].values()):
        assert len({json.dumps(run.get("evaluation_seeds")) for run in runs}) <= 1
    assert file.with_suffix(".png").exists()


@pytest.mark.parametrize("file", sorted(RECORDS.glob("*.json")), ids=lambda file: file.stem)
def test_a_row_meets_what_it_asks_or_says_why_not(file):
    result, row = json.loads(file.read_text(encoding="utf-8")), learning.ROWS[file.stem]
    for bound in ("floor", "ceiling", "gain"):
        assert result.get(bound) == getattr(row, bound)
    assert all(learning.meets(run, result) for run in result["runs"]) is (not row.exception)
    worst = min(run["return"] for run in result["runs"])
    assert row.floor is None or worst < 0 or row.exception or row.floor >= round(2 / 3 * worst, 1)


def test_a_run_is_read_with_the_modules_that_its_row_names():
    rows = [learning.ROWS[name] for name in ("cartpole-ppo", "cartpole-flow-ppo", "masked-dqfd")]
    modules = ["examples.flows", "results.demonstrators"]
    assert [row.allow for row in rows] == [(), *[("--allow", module) for module in modules]]


def test_rows_of_peers_are_rows_and_are_evaluated_in_the_same_states():
    theirs = peers.play("Pendulum-v1", lambda observation: np.zeros(1, np.float32), 3)
    seeded = [environments.SeededEpisodes]
    environment = environments.make("gymnasium:Pendulum-v1", num_envs=3, wrappers=seeded)
    environment.reset()
    ours = sum(environment.step(np.zeros((3, 1), np.float32)).reward for _ in range(200))
    assert theirs == pytest.approx(ours.mean(), rel=1e-5)
    for _, rows, _ in peers.PEERS.values():
        assert set(rows) <= set(learning.ROWS)


def test_the_figures_of_the_readme_are_those_of_files():
    speed = json.loads((ROOT / "benchmarks" / "throughput.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for program, steps in speed["steps_per_second"].items():
        assert f"\n| {program} | {steps:,} |" in page
    ppo, sb3, impala, rllib = speed["steps_per_second"].values()
    results = learning.recorded(("cartpole-dqn", "walker2d-ppo"), RECORDS)
    dqn, walker = ([each["runs"], each["peers"]["sb3"]] for each in results.values())
    median = [statistics.median(run["return"] for run in runs) for runs in dqn]
    mean = [statistics.fmean(run["return"] for run in runs) for runs in walker]
    (dqn_seeds,), (walker_seeds,) = ({len(runs) for runs in row} for row in (dqn, walker))
    day = datetime.date.fromisoformat(speed["date"])
    table = f"""
| PPO, CartPole-v1, one process | {ppo:,} env steps/s | Stable-Baselines3: {sb3:,} |
| IMPALA, CartPole-v1, 2 actors | {impala:,} env steps/s | RLlib: {rllib:,} |
| DQN, CartPole-v1, 50,000 steps, {dqn_seeds} seeds | median return {median[0]:.1f} \
| Stable-Baselines3: {median[1]:.1f} |
| PPO, Walker2d-v5, 1,000,000 steps, {walker_seeds} seeds | mean return {mean[0]:,.0f} \
| Stable-Baselines3: {mean[1]:,.0f} |

The speeds are from commit `{speed["commit"]}` ({day:%B %d, %Y}){speed["since"]}
"""
    before, found, after = (ROOT / "README.md").read_text(encoding="utf-8").partition(table)
    assert found
    # Elsewhere there is none but the goal of `make train`, the floor of its row.
    goal = f"{results['cartpole-dqn']['floor']}"
    unit = r" ?(?:env steps|steps/s|CPU|seconds|of \d|times|×|x |%|percent)"
    assert re.findall(rf"\d[\d,.]*(?={unit})", before + after) == [goal]
    assert {row["steps"] for row in results.values()} == {50_000, 1_000_000}
