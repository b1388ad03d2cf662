"""CPU seconds per env step of whole programs, here and at another commit, in turns.

    python benchmarks/pair.py COMMIT [--rounds 3] [--seconds 8] [--rows PPO …] [--json FILE]

The commit is checked out into a temporary folder, with an environment of its own. A round runs each row at
the commit and here, one after the other, and the next round begins with the other one: what else the machine
does falls on both. A ratio above 1 says that this tree needs more CPU seconds. The rows are those of
throughput.py, in a window after start-up. The commit's own throughput.py runs a row that it has, as settings
may have other names there. Seven rows in three rounds take ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = "benchmarks/throughput.py"
ROWS = {
    "PPO, serial": ("ppo", "repertory PPO, serial"),
    "PPO, processes": ("ppo", "repertory PPO, processes, 2 actors x 4 envs"),
    "DQN, serial": ("dqn", "repertory DQN, serial"),
    "DQN, processes": ("dqn", "repertory DQN, processes"),
    "IMPALA, serial": ("impala", "repertory IMPALA, serial"),
    "IMPALA, processes": ("impala", "repertory IMPALA, processes"),
    "IMPALA, Pong, processes": ("pong", "repertory IMPALA, float32"),
}
LIMIT_S = 240.0  # of one program


def check_out(commit: str, folder: pathlib.Path) -> None:
    """Makes a clone at `commit`, and in it an environment with the versions that it names."""
    subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, folder], check=True)
    subprocess.run(["git", "-C", folder, "checkout", "--quiet", "--detach", commit], check=True)
    script = [sys.executable, ROOT / "constraints/environment.py", folder / ".venv", "--checkout", folder]
    subprocess.run([*script, "--extras", "test", "docs"], check=True)


def cpu_per_step(checkout: pathlib.Path, python: pathlib.Path, row: str, seconds: float) -> float:
    """CPU seconds of all processes of a program, per env step."""
    group, label = ROWS[row]
    script = checkout / SCRIPT
    if not script.exists() or f'"{label}"' not in script.read_text(encoding="utf-8"):
        script = ROOT / SCRIPT
    window = ["--seconds", str(seconds), "--warm-up", "2"]
    done = subprocess.run(
        [python, script, "--one", group, label, *window],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)},
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["cpu"] / result["steps"]


def measure(base: pathlib.Path, rows: list[str], rounds: int, seconds: float) -> dict[str, list[Any]]:
    """Pairs of CPU seconds per env step, at the commit and here, by row."""
    sides = [(base, base / ".venv/bin/python"), (ROOT, pathlib.Path(sys.executable))]
    pairs: dict[str, list[Any]] = {row: [] for row in rows}
    for number in range(rounds):
        for row in rows:
            order = (0, 1) if number % 2 == 0 else (1, 0)
            found = {side: cpu_per_step(*sides[side], row, seconds) for side in order}
            pairs[row].append((found[0], found[1]))
            print(f"  round {number + 1}, {row}: {found[1] / found[0]:.2f}", file=sys.stderr, flush=True)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a program's window")
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows with one of these texts")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the ratios to")
    options = parser.parse_args()
    rows = [row for row in ROWS if any(text in row for text in options.rows)]
    commit = subprocess.run(
        ["git", "rev-parse", "--verify", f"{options.commit}^{{commit}}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="repertory-pair-") as folder:
        base = pathlib.Path(folder) / "base"
        check_out(commit, base)
        pairs = measure(base, rows, options.rounds, options.seconds)
    print(f"\nCPU seconds per env step, here over {commit[:12]} ({options.rounds} rounds)\n")
    print("| program | env steps per CPU-second then | now | ratio of CPU seconds | range |")
    print("|---|---|---|---|---|")
    record: dict[str, Any] = {"base": commit}
    for row, found in pairs.items():
        ratios = sorted(now / then for then, now in found)
        record[row] = [round(ratio, 3) for ratio in ratios]
        then, now = (1 / statistics.median(each[side] for each in found) for side in (0, 1))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"| {row} | {then:,.0f} | {now:,.0f} | {statistics.median(ratios):.2f} | {spread} |")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
