"""Returns of the agents' presets after a given number of steps, over several seeds.

    python -m results.learning [ROW …] [--seeds 1-5] [--out runs/learning] [--peers sb3=PYTHON]
    python -m results.learning --table       # of results/records

Each run is ``repertory train`` on the serial engine in a process of its own (so that its CPU time is its
own) with one torch thread, then ``repertory eval`` over 100 episodes, greedily, of the parameters at the
last step. A row has a preset, or flags of its own; nothing is tuned per seed. Every row writes ``ROW.json``,
again after each seed, and ``ROW.png`` (learning curves with a band over seeds) to the output folder; a seed
in the file is not run again, and a run that was stopped (Ctrl-C, SIGTERM) goes on from its checkpoint, so a
row can be made in several sittings. Where nothing acts, ``data.py`` makes the data first, in the folder
``data`` of the output, and steps are learner steps. ``--peers`` also trains the peers named with the Python
given, one that has them, on the rows of ``peers.py``.

The CPU seconds count everything the command did: its start, its evaluations on the way, its checkpoints.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from results import data
from results.peers import PEERS
from results.rows import RECORDS, ROWS, Row

# Packages of a suite's environments, for the record.
SUITES = {
    "gymnasium": ("mujoco", "box2d"),
    "dm_control": ("dm-control", "mujoco"),
    "minatar": ("minatar",),
    "minigrid": ("minigrid",),
    "pettingzoo": ("pettingzoo", "mpe2"),
    "atari": ("ale-py",),
    "robotics": ("gymnasium-robotics", "mujoco"),
}
STOP_TIMEOUT = 120  # Seconds that a run may take for its last checkpoint before it is killed.


def run(command: list[str], sittings: list[tuple[float, float]]) -> None:
    """Runs a command to its end, or stops it with this program; appends its CPU and wall seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        code = process.wait()
    except BaseException:
        process.terminate()  # A training run then writes a checkpoint.
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        sittings.append((seconds, time.monotonic() - begin))
    if code:
        raise subprocess.CalledProcessError(code, command)


def train(name: str, row: Row, seed: int, folder: pathlib.Path) -> dict[str, Any]:
    """Trains and evaluates one seed, and returns its numbers. A run that was stopped goes on."""
    directory = folder / f"{name}-{seed}"
    command = [sys.executable, "-m", "framework.commands"]
    limit = ["--max-env-steps", str(row.steps)]
    if row.dataset:
        path = data.make(row.dataset, folder / "data")
        limit = ["--max-learner-steps", str(row.steps), "--dataset", str(path)]
    if row.demonstrations:
        limit += ["--demonstrations", str(data.make(row.demonstrations, folder / "data"))]
    flags = [
        *(row.agent, "--environment", row.environment, "--engine", "serial", "--seed", str(seed)),
        *(*limit, "--target-return", "None", "--directory", str(directory)),
        *row.flags,
    ]
    file = directory / "sittings.json"  # CPU and wall seconds of the run, each time it was started.
    sittings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    if not (directory / "result.json").exists():
        try:
            run(
                [
                    *command,
                    "train",
                    *(["--resume", str(directory), *row.allow] if directory.exists() else flags),
                ],
                sittings,
            )
        finally:
            if directory.exists():
                file.write_text(json.dumps(sittings), encoding="utf-8")
    run([*command, "eval", str(directory), "--checkpoint", "latest", "--episodes", "100", *row.allow], [])
    result = json.loads((directory / "evaluation.json").read_text(encoding="utf-8"))
    return {
        "seed": seed,
        **returns_of(result, row),
        "cpu_seconds": round(sum(cpu for cpu, _ in sittings), 1),
        "wall_seconds": round(sum(wall for _, wall in sittings), 1),
        **({} if len(sittings) == 1 else {"sittings": len(sittings)}),
        "steps": row.steps,
        "checkpoint": "latest",
        **record_of(directory, row.environment),
    }


def record_of(directory: pathlib.Path, environment: str) -> dict[str, Any]:
    """The first and the last seed of a run's evaluation, or null, and the versions that the run recorded."""
    import yaml

    evaluation = json.loads((directory / "evaluation.json").read_text(encoding="utf-8"))
    versions = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))["recorded"]["versions"]
    wanted = ("python", "torch", "gymnasium", *SUITES.get(environment.partition(":")[0], ()))
    return {
        "evaluation_seeds": evaluation["episode_seeds"],
        "versions": {name: versions[name] for name in wanted if name in versions},
    }


def returns_of(evaluation: dict[str, Any], row: Row) -> dict[str, float]:
    """`return`, with several agents that of the worst of them, `cost`, and `before`, where they are asked.

    A row with a metric has the mean of that as `return`.
    """
    mean = evaluation[f"mean_{row.metric}" if row.metric else "mean"]
    result = {"return": min(evaluation.get("agents", {"": mean}).values())}
    if row.costs:
        result["cost"] = evaluation["mean_episode_cost"]
    return result if row.gain is None else {**result, "before": evaluation["mean_return_before"]}


def asked_of(bounds: dict[str, Any]) -> str:
    """What a row asks of every run: its `floor`, `ceiling`, and `gain`, in words."""
    floor, ceiling, gain = (bounds.get(name) for name in ("floor", "ceiling", "gain"))
    asked = f"≤ {ceiling:g}" if ceiling is not None else "" if floor is None else f"≥ {floor:g}"
    asked = f"{asked} {bounds['metric']}" if bounds.get("metric") else asked
    if costs := bounds.get("costs"):
        asked = f"{asked}, cost {costs[0]:g} to {costs[1]:g}"
    return asked if gain is None else f"{asked} and {gain:g} above the return before"


def meets(run: dict[str, Any], bounds: dict[str, Any]) -> bool:
    """Whether a run met what its row asks; not if it has no return, since it failed."""
    floor, ceiling, gain = (bounds.get(name) for name in ("floor", "ceiling", "gain"))
    if "return" not in run:
        return False
    if (costs := bounds.get("costs")) and not costs[0] <= run["cost"] <= costs[1]:
        return False
    if ceiling is not None:
        return bool(run["return"] <= ceiling)
    if floor is None:
        return False
    return bool(run["return"] >= max(floor, float("-inf") if gain is None else run["before"] + gain))


def train_peer(peer: str, name: str, seed: int, python: str) -> dict[str, Any]:
    """The same with a peer, by the interpreter that has it."""
    done = subprocess.run(
        [python, pathlib.Path(__file__).with_name("peers.py"), peer, name, "--seed", str(seed)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def seeds_of(text: str) -> list[int]:
    """``"1-3,7"`` → ``[1, 2, 3, 7]``."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds.extend(range(int(first), int(last or first) + 1))
    return seeds


def commit() -> str:
    """The commit that is run, marked if the tree differs from it; empty outside of a checkout."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"], capture_output=True, text=True
    )
    return done.stdout.strip()


def spread_of(returns: list[float]) -> str:
    """The returns as `mean (min … max)`."""
    digits = 2 if max(map(abs, returns)) < 10 else 1
    low, mean, high = min(returns), statistics.fmean(returns), max(returns)
    return f"{mean:.{digits}f} ({low:.{digits}f} … {high:.{digits}f})"


def states_of(runs: list[dict[str, Any]]) -> str:
    """Which first states the runs were evaluated in: `common` are those of the seeds 10,000 + i."""
    common = [bool(each.get("evaluation_seeds")) for each in runs]
    return "common" if all(common) else "both" if any(common) else "own"


def recorded(names: Iterable[str], folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The results in `folder`, of the rows that have any."""
    files = {name: folder / f"{name}.json" for name in names}
    return {
        name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """All rows as one table in Markdown.

    † marks those that were evaluated in the common first states, ‡ those of the best evaluated parameters.
    """
    cells = ["row", "steps", "required", "return: mean (min … max)", "met by", "CPU s", "published"]
    known = any(ROWS[name].published for name in results)
    lines = [f"| {' | '.join(cells if known else cells[:-1])} |", f"|{'---|' * (len(cells) - (not known))}"]
    for name, result in results.items():
        asked = asked_of(result)
        everyone = {"": result["runs"]}
        for peer, (who, _, _) in PEERS.items():
            everyone[f" ({who})"] = result["peers"].get(peer, [])
        for who, runs in everyone.items():
            if not runs:
                continue
            returns = [each["return"] for each in runs]
            seconds = [each["cpu_seconds"] for each in runs]
            reached = sum(meets(each, result) for each in runs)
            mark = "†" if states_of(runs) == "common" else ""
            mark += "‡" if any(each.get("checkpoint") == "best" for each in runs) else ""
            line = f"| {name}{who} | {runs[0]['steps']:,} | {asked} | {spread_of(returns)}{mark} "
            line += (
                f"| {f'{reached} of {len(returns)}' if asked else ''} | {statistics.fmean(seconds):,.0f} |"
            )
            lines.append(f"{line} {ROWS[name].published if not who else ''} |" if known else line)
    return "\n".join(lines)


def tasks(results: dict[str, dict[str, Any]]) -> str:
    """A section in Markdown for each task, with the pictures of its rows, and one for masks and tuples."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    small: dict[str, dict[str, dict[str, Any]]] = {}
    for name, result in results.items():
        kind, _, agent = name.partition("-")
        if kind in ("masked", "tuple"):
            small.setdefault(agent, {})[kind] = result
        else:
            groups.setdefault(ROWS[name].environment, {})[name] = result
    parts = []
    for task, rows in groups.items():
        files = [f"../results/records/{name}.png" for name in rows if (RECORDS / f"{name}.png").exists()]
        shown = "\n".join(f"[![{pathlib.Path(file).stem}]({file})]({file})" for file in files)
        parts.append(
            f'### {task}\n\n<div class="beside" markdown>\n<div markdown>\n\n{table(rows)}\n\n</div>\n'
            f'<div class="pictures" markdown>\n\n{shown}\n\n</div>\n</div>'
        )
    if small:
        lines = ["| agent | masked | CPU s | tuple | CPU s |", "|---|---|---|---|---|"]
        for agent, kinds in sorted(small.items()):
            cells = [f" {cell} |" for kind in ("masked", "tuple") for cell in _small(kinds.get(kind))]
            lines.append(f"| {agent} |{''.join(cells)}")
        parts.append("### Masks and tuples of actions\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _small(result: dict[str, Any] | None) -> tuple[str, str]:
    """The return, the seeds that met what is asked unless all did, and CPU seconds; empty without a row."""
    if result is None:
        return "", ""
    runs = result["runs"]
    met = sum(meets(each, result) for each in runs)
    told = spread_of([each["return"] for each in runs]) + (
        "" if met == len(runs) else f", {met} of {len(runs)}"
    )
    return told, f"{statistics.fmean(each['cpu_seconds'] for each in runs):.0f}"


def make_row(name: str, seeds: list[int], folder: pathlib.Path, peers: dict[str, str]) -> dict[str, Any]:
    """Runs what is missing of one row, writes its files and returns its numbers."""
    row, file = ROWS[name], folder / f"{name}.json"
    result: dict[str, Any] = {"runs": [], "peers": {}}
    if file.exists():
        result = json.loads(file.read_text(encoding="utf-8"))
    result = {**dataclasses.asdict(row), "runs": result["runs"], "peers": result["peers"]}
    todo: list[tuple[str | None, int]] = [(None, seed) for seed in seeds]
    for peer in peers:
        if name in PEERS[peer][1]:
            todo += [(peer, seed) for seed in seeds]
    for who, seed in todo:
        done = result["runs"] if who is None else result["peers"].setdefault(who, [])
        if any(each["seed"] == seed for each in done):
            continue
        if who is None:
            from results import pictures  # Here, as it loads torch, which --table does without.

            made = {"date": str(datetime.date.today()), "commit": commit()}  # Not those of its end.
            numbers = {**train(name, row, seed, folder), **made}
            curve = pictures.curve_of(folder / f"{name}-{seed}")
        else:
            numbers = train_peer(who, name, seed, peers[who])
            curve = numbers.pop("curve", None)
        print(f"{name} {who or 'repertory'} {numbers}", flush=True)
        done.append(numbers if curve is None else {**numbers, "curve": curve})
        done.sort(key=lambda each: each["seed"])
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if who is None:
            pictures.draw_row(result, folder / f"{name}.png")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", default=[], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", type=seeds_of, default=[1, 2, 3, 4, 5], metavar="1-5")
    parser.add_argument("--out", type=pathlib.Path, help="runs/learning; with --table results/records")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=[],
        metavar="PEER=PYTHON",
        help=f"{', '.join(PEERS)}: interpreters that have them",
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table of the files in --out, run nothing"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.rows) - set(ROWS))
    if unknown:
        parser.error(f"no row {unknown}; the rows are {list(ROWS)}")
    peers = dict(each.split("=", 1) for each in options.peers if "=" in each)
    if len(peers) < len(options.peers) or not set(peers) <= set(PEERS):
        parser.error(f"--peers takes PEER=PYTHON, PEER one of {list(PEERS)}: {options.peers}")
    out = options.out or (RECORDS if options.table else pathlib.Path("runs/learning"))
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = options.rows or list(ROWS)
    for name in () if options.table else names:
        print(table({name: make_row(name, options.seeds, out, peers)}), flush=True)
    print(table(recorded(names, out)))


if __name__ == "__main__":
    main()
