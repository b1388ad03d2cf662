"""`repertory plot`: learning curves of runs, averaged over runs that differ only in their seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from framework.commands.options import CommandError, UsageError, parse
from framework.loggers.files import read_jsonl
from framework.programs.run_folder import RunFolder

_GRID = 200  # points on the x axis at which the curves of several seeds are averaged
# Settings in which runs of one experiment may differ.
_NOT_COMPARED = (
    "seed",
    "directory",
    "keep_checkpoints",
    "checkpoint_period",
    "checkpoint_minutes",
    "csv",
    "tensorboard",
)


@dataclass(frozen=True)
class PlotOptions:
    """Draws the learning curves of runs; runs that differ only in their seed become a mean with a band."""

    runs: tyro.conf.Positional[tuple[str, ...]]  # Folders of runs.
    output: str = "curves.png"  # The picture: png, svg or pdf.
    metric: str = "episode_return"  # The metric, drawn against env steps.
    label: str = "evaluator"  # Label of the rows: evaluator, learner, actor.


@dataclass(frozen=True)
class Curve:
    """Values `y` `[n]` at increasing `x` `[n]`."""

    x: np.ndarray
    y: np.ndarray


def main(arguments: Sequence[str]) -> int:
    options = parse(PlotOptions, arguments, prog="repertory plot")
    if not options.runs:
        raise UsageError("plot: got no runs, expected repertory plot RUN [RUN ...].")
    groups: dict[str, list[tuple[RunFolder, Curve]]] = {}
    for path in options.runs:
        folder = RunFolder.open(path)
        curve = read_curve(folder, options.label, options.metric)
        if not len(curve.x):
            raise CommandError(
                f"{path} has no {options.metric!r} of {options.label!r} in metrics.jsonl yet; it has "
                f"{_what_there_is(folder)}."
            )
        groups.setdefault(_experiment(folder), []).append((folder, curve))
    curves = {_name(members, groups): [curve for _, curve in members] for members in groups.values()}
    draw(curves, options.metric, Path(options.output))
    print(f"{len(options.runs)} runs in {options.output}")
    return 0


def draw_run(folder: RunFolder) -> Path | None:
    """Draws the greedy and acting returns of a run in `curve.png`; returns None if there are none yet."""
    curves = {}
    for name, label in (("greedy", "evaluator"), ("acting", "actor")):
        curve = read_curve(folder, label, "episode_return")
        if len(curve.x):
            curves[name] = [smooth(curve)]
    if not curves:
        return None
    return draw(
        curves,
        "episode_return",
        folder.path / "curve.png",
        title=f"{folder.agent} in {folder.environment_name}",
    )


def read_curve(folder: RunFolder, label: str, metric: str) -> Curve:
    """Reads a metric of a label's rows against env steps; `actor` means all actors together."""
    points: dict[float, float] = {}
    made: dict[str, int] = {}  # env steps of each actor in its newest row
    if folder.metrics.exists():
        for row in read_jsonl(folder.metrics):
            of = str(row.get("label", ""))
            if of.rpartition("-")[0] != label and of != label:
                continue
            value, steps, own = row.get(metric), row.get("env_steps"), row.get("steps")
            if steps is None and isinstance(own, int):  # an actor counts its own steps only
                made[of] = own
                steps = sum(made.values())
            if isinstance(steps, int | float) and isinstance(value, int | float):
                points[steps] = value  # a resumed run may have evaluated this step before
    array = np.array(sorted(points.items()), dtype=np.float64).reshape(-1, 2)
    return Curve(array[:, 0], array[:, 1])


def smooth(curve: Curve, places: int = 60) -> Curve:
    """Averages over equal intervals of x if there are more than `places` points; else returns the curve."""
    if len(curve.x) <= places:
        return curve
    edges = np.linspace(curve.x[0], curve.x[-1], places + 1)[1:-1]
    stretch = np.searchsorted(edges, curve.x, side="right")
    counts = np.bincount(stretch, minlength=places)
    there = counts > 0
    x, y = (np.bincount(stretch, values, places)[there] / counts[there] for values in (curve.x, curve.y))
    return Curve(x, y)


def average(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `(x, mean, standard deviation)` where all curves have data."""
    first, last = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.linspace(first, max(first, last), _GRID)
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    return x, values.mean(0), values.std(0)


def draw(curves: dict[str, list[Curve]], metric: str, output: Path, title: str = "") -> Path:
    """Draws each entry as one curve, with a band of one standard deviation if it has several seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a window, whatever the user's settings
    axes = figure.add_subplot()
    for name, members in curves.items():
        if len(members) == 1:
            marker = "o" if len(members[0].x) < 30 else None
            axes.plot(members[0].x, members[0].y, label=name, marker=marker, markersize=3)
            continue
        x, mean, deviation = average(members)
        (line,) = axes.plot(x, mean, label=f"{name} ({len(members)} seeds)")
        axes.fill_between(x, mean - deviation, mean + deviation, alpha=0.2, color=line.get_color())
    axes.set_xlabel("env steps")
    axes.set_ylabel(metric.replace("_", " "))
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(output, dpi=120)
    except ValueError as error:
        raise UsageError(f"--output {output}: {error}") from error
    return output


def _experiment(folder: RunFolder) -> str:
    """Returns a key that is equal for runs that differ only in settings irrelevant to learning."""
    settings = {**asdict(folder), **asdict(folder.config)}
    del settings["config"]
    return json.dumps({name: value for name, value in settings.items() if name not in _NOT_COMPARED})


def _name(members: list[tuple[RunFolder, Curve]], groups: dict[str, Any]) -> str:
    folder = members[0][0]
    name = f"{folder.agent}, {folder.environment_name}"
    return name if len(groups) == 1 else f"{name}, {folder.path.name}"


def _what_there_is(folder: RunFolder) -> str:
    labels = set()
    if folder.metrics.exists():
        labels = {str(row.get("label")).partition("-")[0] for row in read_jsonl(folder.metrics)}
    return f"rows of {', '.join(sorted(labels))}" if labels else "no rows at all"
