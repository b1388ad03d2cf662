"""Curves of a row of ``learning.py`` beside a peer's, over env steps and over hours.

    python benchmarks/learning_pictures.py ROW FOLDER… [--results docs/results] [--peer sb3]

FOLDER is one run of the row, one per seed; the peer's curves are in ``ROW.json``, for the peers whose runs
``learning_peers.py`` measures on the way. Draws ``ROW-steps.png`` and ``ROW-hours.png`` to the folder of the
results: median and quartiles over seeds of the mean action's returns and of the sampled actions'.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import learning_peers
import numpy as np

from framework.commands.curves import Axis, Curve, read_curve, smooth
from framework.commands.plot import draw
from framework.programs.run_folder import RunFolder

ACTIONS = {"mean action": ("evaluator", "greedy"), "sampled actions": ("actor", "acting")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("row")
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--peer", default="sb3", choices=list(learning_peers.PEERS))
    options = parser.parse_args()
    runs = [RunFolder.open(each) for each in options.folders]
    measured = json.loads((options.results / f"{options.row}.json").read_text(encoding="utf-8"))["peers"]
    theirs = [each["curve"] for each in measured.get(options.peer, []) if "curve" in each]
    axes: dict[Axis, str] = {"steps": "env_steps", "hours": "hours"}
    for axis, key in axes.items():
        curves: dict[str, list[Curve]] = {}
        for name, (label, field) in ACTIONS.items():
            curves[f"{runs[0].agent}, {name}"] = [
                smooth(read_curve(run, label, "episode_return", axis)) for run in runs
            ]
            if theirs:
                who = learning_peers.PEERS[options.peer][0]
                curves[f"{who}, {name}"] = [
                    Curve(np.asarray(each[key], np.float64), np.asarray(each[field], np.float64))
                    for each in theirs
                ]
        output = options.results / f"{options.row}-{axis}.png"
        draw(curves, "episode return", output, runs[0].environment_name, axis, "quartiles")
        print(output)


if __name__ == "__main__":
    main()
