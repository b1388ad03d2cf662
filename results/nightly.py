"""Whether every agent learns in every distributed form as it does on the serial engine.

    python -m results.nightly [ROW …] [--engines processes served …] [--seeds 1-3] [--python ray=PYTHON …]
    python -m results.nightly --table [--out results/records/nightly]

The rows are those of ``learning.py`` in CartPole and Pendulum, one for each agent, and for the other agents
and Munchausen DQN those of MORE_ROWS, with the same steps and the same floor. Each run is ``repertory train``
with the row's settings, but for what an engine of ENGINES changes, with at least two actors and without
evaluations on the way; then ``repertory eval`` over 100 episodes, greedily, of the parameters at the last
step. Every run is added to ``ROW.json`` in the output folder, and a seed that is in the file already is not
run again. An engine whose package the interpreter lacks is left out; ``--python`` names an interpreter that
has it. The exit code is 1 if a run failed or missed its floor or gain.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from framework.runs.presets import Preset, presets_of
from framework.runs.registry import find_agent
from results import learning
from results.rows import RECORDS

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Flags by engine, and the package that it needs.
ENGINES: dict[str, tuple[tuple[str, ...], str]] = {
    "processes": (("--engine", "processes"), "torch"),
    "served": (("--engine", "processes", "--inference", "server"), "torch"),
    "ray": (("--engine", "ray"), "ray"),
    "launchpad": (("--engine", "launchpad"), "launchpad"),
    "reverb": (("--engine", "processes", "--replay-backend", "reverb"), "reverb"),
}
ENVIRONMENTS = ("gymnasium:CartPole-v1", "gymnasium:Pendulum-v1")
# Agents that have no such row, and an option.
MORE_ROWS = (
    *("cartpole-munchausen", "hidden-cartpole-r2d2", "mountaincar-dqfd", "four-cartpoles-ppo-dqn"),
    *("navigation-maml", "road-ppo-lagrangian", "tuple-batch_ppo", "tuple-recurrent_td3"),
    "tuple-td7",
)
_MOST_STEPS = 200_000
USAGE = 2  # The exit code of `repertory train` for what an agent cannot do.
TIMEOUT = 1800  # Seconds of one command.


def rows() -> dict[str, learning.Row]:
    """The first short row of each agent in one of ENVIRONMENTS with a floor and no flags, and MORE_ROWS."""
    found: dict[str, tuple[str, learning.Row]] = {}
    for name, row in learning.ROWS.items():
        has_floor = row.floor is not None and row.steps <= _MOST_STEPS
        if row.environment in ENVIRONMENTS and has_floor and not (row.flags or row.dataset):
            found.setdefault(row.agent, (name, row))
    return {**dict(found.values()), **{name: learning.ROWS[name] for name in MORE_ROWS}}


def envs_of(row: learning.Row) -> tuple[int, int]:
    """At least two actors with the row's number of envs."""
    preset = presets_of(find_agent(row.agent).load()).get(row.environment, Preset()).run
    given = dict(zip(row.flags, row.flags[1:], strict=False))
    actors = int(given.get("--num-actors", preset.get("num_actors", 2)))
    envs = int(given.get("--envs-per-actor", preset.get("envs_per_actor", 4)))
    if actors == 1:
        actors, envs = 2, max(envs // 2, 1)
    return actors, envs


def run(python: str, name: str, row: learning.Row, engine: str, seed: int) -> dict[str, Any]:
    """Trains and evaluates one seed; returns its numbers, or `refused` or `failed` with the reason."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-{engine}-") as folder:
        directory = pathlib.Path(folder) / "run"
        actors, envs = envs_of(row)
        command = (python, "-m", "framework.commands")
        train = (
            *command, "train", row.agent, "--environment", row.environment, "--seed", str(seed),
            "--max-env-steps", str(row.steps), "--target-return", "None", "--directory", str(directory),
            "--evaluate-period", "None", *ENGINES[engine][0],
            *row.flags, "--num-actors", str(actors), "--envs-per-actor", str(envs),
        )  # fmt: skip
        begin = time.monotonic()
        for each in (train, (*command, "eval", str(directory), "--episodes", "100", *row.allow)):
            try:
                done = subprocess.run(each, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                return {"seed": seed, "failed": f"{each[3]} did not end within {TIMEOUT} s"}
            if done.returncode:
                what = "refused" if done.returncode == USAGE else "failed"
                return {"seed": seed, what: done.stderr.strip()[-2000:]}
            if each is train:
                seconds = time.monotonic() - begin
        result = json.loads((directory / "evaluation.json").read_text(encoding="utf-8"))
        record = learning.record_of(directory, row.environment)
        lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    written = [json.loads(line) for line in lines]
    learner = [each for each in written if each["label"] == "learner"]
    acting = [each for each in written if each["label"].startswith("actor-")]
    staleness = [each["acting_staleness"] for each in acting if "acting_staleness" in each]
    ratios = [
        value
        for each in learner
        for key, value in each.items()
        if key.endswith("/samples_per_insert") and "/demonstrations/" not in key  # Filled once.
    ]
    return {
        "seed": seed,
        **learning.returns_of(result, row),
        **record,
        "staleness": round(statistics.fmean(staleness), 2) if staleness else None,
        "samples_per_insert": round(ratios[-1], 3) if ratios else None,
        "learner_steps": learner[-1]["steps"],
        "wall_seconds": round(seconds, 1),
        "num_actors": actors,
        "envs_per_actor": envs,
    }


def has(python: str, package: str) -> bool:
    """Whether the interpreter can import the package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def make_row(
    name: str, engines: list[str], seeds: list[int], folder: pathlib.Path, pythons: dict[str, str]
) -> int:
    """Runs what is missing of one row, writes its file, and returns how many runs do not meet it."""
    row, file, missed = rows()[name], folder / f"{name}.json", 0
    result = {
        "agent": row.agent,
        "environment": row.environment,
        "steps": row.steps,
        "floor": row.floor,
        **({} if row.gain is None else {"gain": row.gain}),
        "runs": {},
    }
    if file.exists():
        result["runs"] = json.loads(file.read_text(encoding="utf-8"))["runs"]
    for engine in engines:
        done = result["runs"].setdefault(engine, [])
        for seed in seeds:
            numbers = next((each for each in done if each["seed"] == seed and "failed" not in each), None)
            if numbers is None:
                # Not at the end: the tree may change while it trains.
                made = {"date": str(datetime.date.today()), "commit": learning.commit()}
                numbers = {**run(pythons.get(engine, sys.executable), name, row, engine, seed), **made}
                done[:] = sorted([*(e for e in done if e["seed"] != seed), numbers], key=lambda e: e["seed"])
                file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(name, engine, numbers, flush=True)
            missed += "refused" not in numbers and not learning.meets(numbers, result)
    return missed


def table(folder: pathlib.Path, names: list[str]) -> str:
    """The results as one table in Markdown, and how many runs are below what their row asks."""
    met: list[bool] = []
    lines = [
        "| row | engine | required | return: mean (min … max) | met by | staleness "
        "| samples per insert | s a run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        file = folder / f"{name}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        for engine in ENGINES:
            runs = result["runs"].get(engine, [])
            done = [each for each in runs if "return" in each]
            head = f"| {name} | {engine} | {learning.asked_of(result)} |"
            if not done:
                if runs:
                    lines.append(f"{head} {'refused' if 'refused' in runs[0] else 'failed'} | | | | |")
                continue
            returns = [each["return"] for each in done]
            reached = sum(meets := [learning.meets(each, result) for each in done])
            met += meets
            lines.append(
                f"{head} {learning.spread_of(returns)} "
                f"| {reached} of {len(runs)} | {_mean(done, 'staleness', 1)} "
                f"| {_mean(done, 'samples_per_insert', 2)} | {_mean(done, 'wall_seconds', 0)} |"
            )
    lines += ["", f"{met.count(False)} of {len(met)} runs end below what their row asks."]
    return "\n".join(lines)


def _mean(runs: list[dict[str, Any]], name: str, digits: int) -> str:
    values = [each[name] for each in runs if each[name] is not None]
    return f"{statistics.fmean(values):.{digits}f}" if values else "—"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", default=[], metavar="ROW", help=", ".join(rows()))
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--seeds", type=learning.seeds_of, default=[1, 2, 3], metavar="1-3")
    parser.add_argument("--out", type=pathlib.Path, default=RECORDS / "nightly")
    parser.add_argument("--python", nargs="+", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument(
        "--table", action="store_true", help="print the table of the files in --out, run nothing"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.rows) - set(rows())):
        parser.error(f"no row {unknown}; the rows are {list(rows())}")
    names, missed = options.rows or list(rows()), 0
    if not options.table:
        pythons = dict(each.split("=", 1) for each in options.python)
        engines = [e for e in options.engines if has(pythons.get(e, sys.executable), ENGINES[e][1])]
        if left_out := sorted(set(options.engines) - set(engines)):
            print(f"left out, for the lack of their packages: {left_out}", file=sys.stderr)
        options.out.mkdir(parents=True, exist_ok=True)
        missed = sum(make_row(name, engines, options.seeds, options.out, pythons) for name in names)
    print(table(options.out, names))
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
