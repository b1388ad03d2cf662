"""Agents beside each other over several tasks: interquartile means against env steps and CPU hours.

    python -m results.summary

Draws ``records/summary.png`` from the records of ``learning.py``: a row of two pictures for each suite of
SUITES, with the band of a bootstrap that is stratified by task (Agarwal et al., 2021), and prints each
agent's last value. Returns are normalized by task. An agent without a record of each task is left out, and
so is a suite without agents. CPU hours are wall hours, times a run's CPU seconds per second of wall time.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from framework.experiments.statistics import stratified_interval
from results.pictures import curves_of
from results.rows import FIVE_GAMES, RECORDS

POINTS = 60  # of a curve


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tasks over which agents are compared.

    Attributes:
      title: of the pictures.
      agents: their names in the rows.
      tasks: the returns that count as 0 and as 1, by the task's name in the rows. None: the best mean over
        seeds that any of the agents has at the end.
    """

    title: str
    agents: tuple[str, ...]
    tasks: dict[str, tuple[float, float | None]]


# Random actions return 0 points, as means of 100 episodes. In MuJoCo, both are D4RL's references (Fu et al.,
# 2020).
SUITES = (
    Suite(
        "MinAtar, five games",
        ("dqn", "rainbow", "ppo"),
        {
            f"five-games-{game.lower()}": (zero, None)
            for game, zero in zip(FIVE_GAMES, (0.5, 0.4, 0.3, 0.1, 3.8), strict=True)
        },
    ),
    Suite(
        "Hopper-v5 and Walker2d-v5",
        ("sac", "crossq", "simba"),
        {"hopper": (-20.3, 3234.3), "walker2d": (1.6, 4592.3)},
    ),
)


def read(suite: Suite, folder: pathlib.Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The runs by agent and task, of the agents that have a record of each task."""
    files = {agent: {task: folder / f"{task}-{agent}.json" for task in suite.tasks} for agent in suite.agents}
    return {
        agent: {task: json.loads(file.read_text(encoding="utf-8"))["runs"] for task, file in tasks.items()}
        for agent, tasks in files.items()
        if all(file.exists() for file in tasks.values())
    }


def ends_of(suite: Suite, runs: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, tuple[float, float]]:
    """The returns that count as 0 and as 1, by task."""
    return {
        task: (zero, max(np.mean([run["return"] for run in tasks[task]]) for tasks in runs.values()))
        if one is None
        else (zero, one)
        for task, (zero, one) in suite.tasks.items()
    }


def scores(
    tasks: dict[str, list[dict[str, Any]]], ends: dict[str, tuple[float, float]], axis: str
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Points `x` `[n]` that all of an agent's runs have, and by task the scores `[R, n]` of its R runs."""
    found = []
    for task, runs in tasks.items():
        zero, one = ends[task]
        of_task = []
        for run, curve in zip(runs, curves_of(runs, axis), strict=True):
            scale = run["cpu_seconds"] / run["wall_seconds"] if axis == "hours" else 1.0
            of_task.append((curve.x * scale, (curve.y - zero) / (one - zero)))
        found.append(of_task)
    everything = [curve for of_task in found for curve in of_task]
    first, last = max(x[0] for x, _ in everything), min(x[-1] for x, _ in everything)
    points = np.linspace(first, last, POINTS)
    return points, [np.stack([np.interp(points, x, y) for x, y in of_task]) for of_task in found]


def draw(folder: pathlib.Path, output: pathlib.Path) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Draws the picture; returns by suite and agent the last interquartile mean and its interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [(suite, runs) for suite in SUITES if (runs := read(suite, folder))]
    figure = Figure(figsize=(10, 3.6 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)  # Draws without a window.
    last: dict[str, dict[str, tuple[float, float, float]]] = {}
    for row, (suite, runs) in enumerate(found):
        ends = ends_of(suite, runs)
        for column, (axis, label) in enumerate((("env_steps", "env steps"), ("hours", "CPU hours"))):
            axes = figure.add_subplot(len(found), 2, 2 * row + column + 1)
            for agent, tasks in runs.items():
                x, values = scores(tasks, ends, axis)
                each = [stratified_interval([task[:, at] for task in values]) for at in range(len(x))]
                center, low, high = np.array(each).T
                (line,) = axes.plot(x, center, label=f"{agent} ({sum(map(len, values))} runs)")
                axes.fill_between(x, low, high, alpha=0.2, color=line.get_color())
                if axis == "env_steps":
                    last.setdefault(suite.title, {})[agent] = each[-1]
            axes.set_xlabel(label)
            axes.set_ylabel("normalized return: IQM, 95 % CI")
            axes.set_title(suite.title)
            axes.legend()
    figure.savefig(output, dpi=110)
    return last


def main() -> None:
    for title, agents in draw(RECORDS, RECORDS / "summary.png").items():
        for agent, (center, low, high) in agents.items():
            print(f"{title}, {agent}: {center:.2f} ({low:.2f} … {high:.2f})")


if __name__ == "__main__":
    main()
