"""Curves of a row of ``learning.py`` beside a peer's, over env steps and over hours.

    python -m results.pictures ROW… [--peer sb3]

Both curves are in ``ROW.json``, the peer's if ``peers.py`` measures it on the way. Draws
``ROW-steps.png`` and ``ROW-hours.png`` beside it: median and quartiles over seeds of the mean action's
returns and of the sampled actions'.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import numpy as np

from framework.commands.curves import Axis, Curve, Hours, read_curve, smooth
from framework.commands.plot import draw
from framework.loggers.files import read_jsonl
from framework.runs.run_folder import RunFolder
from results.peers import PEERS
from results.rows import RECORDS

ACTIONS = {"mean action": "greedy", "sampled actions": "acting"}
KEYS: dict[Axis, str] = {"steps": "env_steps", "hours": "hours"}


def curve_of(directory: pathlib.Path) -> dict[str, list[float]]:
    """Mean returns of a run, greedy and acting, at the steps and the hours of its evaluations.

    Where nothing acts, the steps are learner steps, and there is no `acting`.
    """
    run = RunFolder.open(directory)
    evaluations, acting = (
        read_curve(run, "evaluator", "episode_return"),
        read_curve(run, "actor", "episode_return"),
    )
    greedy, acting = smooth(evaluations), smooth(acting)
    clock, hours = Hours(), {}
    for row in read_jsonl(run.metrics):
        at = clock.at(row)  # It must see all rows.
        if str(row.get("label")).startswith("evaluator"):
            # What a resumed run evaluates again counts the last time.
            hours[row.get("env_steps", row.get("variables_version"))] = at
    times = np.array([hours[x] for x in evaluations.x])
    curve = {
        "env_steps": greedy.x,
        "hours": smooth(Curve(evaluations.x, times)).y,
        **({"acting": np.interp(greedy.x, acting.x, acting.y)} if len(acting.x) else {}),
        "greedy": greedy.y,
    }
    return {name: values.round(5).tolist() for name, values in curve.items()}


def curves_of(runs: list[dict[str, Any]], x: str = "env_steps", y: str = "greedy") -> list[Curve]:
    """The curves of those runs that have one; earlier ones were kept as pictures only."""
    kept = [run["curve"] for run in runs if "curve" in run]
    return [Curve(np.array(curve[x]), np.array(curve[y])) for curve in kept]


def draw_row(row: dict[str, Any], output: pathlib.Path) -> None:
    """Draws the greedy returns of a row's seeds over its steps."""
    curves = {f"{row['agent']}, {row['environment']}": curves_of(row["runs"])}
    draw(curves, "episode return (greedy)", output, axis="updates" if row.get("dataset") else "steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROW")
    parser.add_argument("--peer", default="sb3", choices=list(PEERS))
    options = parser.parse_args()
    for name in options.rows:
        row = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
        everyone = {
            row["agent"]: row["runs"],
            PEERS[options.peer][0]: row["peers"].get(options.peer, []),
        }
        for axis, key in KEYS.items():
            curves = {
                f"{who}, {actions}": curves_of(runs, key, field)
                for who, runs in everyone.items()
                for actions, field in ACTIONS.items()
                if any("curve" in run for run in runs)
            }
            output = RECORDS / f"{name}-{axis}.png"
            draw(curves, "episode return", output, row["environment"], axis, "quartiles")
            print(output)


if __name__ == "__main__":
    main()
