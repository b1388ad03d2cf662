"""Returns of the agents' presets after a given number of steps, over several seeds.

    python benchmarks/learning.py [ROW …] [--seeds 5] [--out results/learning] [--peers]

Each run is ``repertory train`` on the serial engine in a process of its own (so that its CPU time is its
own), then ``repertory eval`` over 100 episodes, greedily. One preset a row, nothing is tuned per seed. Every
row writes ``ROW.json`` and ``ROW.png`` (learning curves with a band over seeds) to the output folder, and all
rows together print one table. ``--peers`` also trains Stable-Baselines3 where it is installed, on the rows
that it has settings for (those of its Zoo), in the same script.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: what is trained, how long, and the return that every seed must reach."""

    agent: str
    environment: str
    steps: int
    floor: float
    flags: tuple[str, ...] = ()


ROWS = {
    "cartpole-dqn": Row("dqn", "gymnasium:CartPole-v1", 50_000, 475),
    "cartpole-ppo": Row("ppo", "gymnasium:CartPole-v1", 60_000, 475),
    "cartpole-impala": Row("impala", "gymnasium:CartPole-v1", 150_000, 475),
    "acrobot-ppo": Row("ppo", "gymnasium:Acrobot-v1", 200_000, -90),
    "pendulum-sac": Row("sac", "gymnasium:Pendulum-v1", 20_000, -200),
    "pendulum-ppo": Row("ppo", "gymnasium:Pendulum-v1", 200_000, -250),
    "lunarlander-ppo": Row("ppo", "gymnasium:LunarLander-v3", 1_000_000, 200),
    "breakout-impala": Row("impala", "minatar:Breakout", 2_000_000, 8),
    "breakout-dqn": Row("dqn", "minatar:Breakout", 1_000_000, 5),
    "halfcheetah-sac": Row("sac", "gymnasium:HalfCheetah-v5", 200_000, 4000),
}

# Stable-Baselines3 with the settings of its Zoo: class, learning steps, keyword arguments.
PEERS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "cartpole-ppo": (
        "PPO",
        60_000,
        {
            "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
            "ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2,
        },
        8,
    ),
    "cartpole-dqn": (
        "DQN",
        50_000,
        {
            "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000,
            "gamma": 0.99, "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
            "exploration_fraction": 0.16, "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
        1,
    ),
    "pendulum-sac": ("SAC", 20_000, {"learning_rate": 1e-3}, 1),
}  # fmt: skip


def run(command: list[str]) -> float:
    """Runs a command to its end; returns its CPU seconds, children's included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train(name: str, row: Row, seed: int, folder: pathlib.Path) -> dict[str, Any]:
    """Trains and evaluates one seed; returns its numbers."""
    directory = folder / f"{name}-{seed}"
    command = [sys.executable, "-m", "agents"]
    seconds = run(
        [
            *command, "train", row.agent, "--environment", row.environment, "--engine", "serial",
            "--seed", str(seed), "--max-actor-steps", str(row.steps), "--target-return", "None",
            "--directory", str(directory), *row.flags,
        ]
    )  # fmt: skip
    run([*command, "eval", str(directory), "--episodes", "100"])
    result = json.loads((directory / "evaluation.json").read_text(encoding="utf-8"))
    return {"seed": seed, "return": result["mean"], "cpu_seconds": seconds, "steps": row.steps}


def train_peer(name: str, seed: int) -> dict[str, Any] | None:
    """The same with Stable-Baselines3, in a process of its own; None if it is not installed."""
    if name not in PEERS or subprocess.run([sys.executable, "-c", "import stable_baselines3"]).returncode:
        return None
    kind, steps, settings, lanes = PEERS[name]
    environment = ROWS[name].environment.split(":", 1)[1]
    code = (
        "import stable_baselines3 as sb3, torch, json;"
        "from stable_baselines3.common.env_util import make_vec_env;"
        "from stable_baselines3.common.evaluation import evaluate_policy;"
        "torch.set_num_threads(1);"
        f"model = sb3.{kind}('MlpPolicy', make_vec_env({environment!r}, {lanes}, seed={seed}), seed={seed},"
        f" device='cpu', **{settings!r});"
        f"model.learn({steps});"
        f"print(evaluate_policy(model, make_vec_env({environment!r}, 1, seed=1), 100)[0])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seed": seed,
        "return": float(done.stdout.split()[-1]),
        "cpu_seconds": seconds,
        "steps": steps,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """All rows as one table in Markdown."""
    lines = [
        "| row | steps | floor | return: mean (min … max) | seeds at the floor | CPU s a run |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for who, runs in (("", result["runs"]), (" (SB3)", result["peer"])):
            if not runs:
                continue
            returns = [each["return"] for each in runs]
            seconds = statistics.fmean(each["cpu_seconds"] for each in runs)
            reached = sum(value >= result["floor"] for value in returns)
            lines.append(
                f"| {name}{who} | {runs[0]['steps']:,} | {result['floor']:g} "
                f"| {statistics.fmean(returns):.1f} ({min(returns):.1f} … {max(returns):.1f}) "
                f"| {reached} of {len(returns)} | {seconds:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", default=[], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results/learning"))
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    unknown = sorted(set(options.rows) - set(ROWS))
    if unknown:
        parser.error(f"no row {unknown}; the rows are {list(ROWS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for name in options.rows or ROWS:
        row = ROWS[name]
        seeds = range(1, options.seeds + 1)
        runs = [train(name, row, seed, options.out) for seed in seeds]
        peer = [each for seed in seeds if options.peers and (each := train_peer(name, seed))]
        results[name] = {**dataclasses.asdict(row), "runs": runs, "peer": peer}
        (options.out / f"{name}.json").write_text(json.dumps(results[name], indent=1), encoding="utf-8")
        folders = [str(options.out / f"{name}-{seed}") for seed in seeds]
        run([sys.executable, "-m", "agents", "plot", *folders, "--output", str(options.out / f"{name}.png")])
        print(table({name: results[name]}), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
