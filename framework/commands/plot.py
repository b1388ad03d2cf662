"""`repertory plot`: learning curves of runs, averaged over runs that differ only in their seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from framework.commands.options import CommandError, UsageError, parse
from framework.loggers.files import read_jsonl
from framework.programs.run_folder import RunFolder

_GRID = 200  # Points on the x axis at which the curves of several seeds are averaged.
# Settings in which runs of one experiment may differ.
_NOT_COMPARED = {"seed", "directory", "keep_checkpoints", "checkpoint_period", "checkpoint_minutes"}
_NOT_COMPARED |= {"loggers", "resources", "learner_threads", "config"}


@dataclass(frozen=True)
class PlotOptions:
    """Draws the learning curves of runs; runs that differ only in their seed become a mean with a band."""

    # Folders of runs.
    runs: tyro.conf.Positional[tuple[Annotated[str, tyro.conf.arg(metavar="RUN")], ...]]
    # The picture: png, svg or pdf. An existing file is replaced.
    output: Annotated[str, tyro.conf.arg(metavar="FILE")] = "curves.png"
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
            rows = read_jsonl(folder.metrics) if folder.metrics.exists() else ()
            labels = sorted({str(row.get("label")).partition("-")[0] for row in rows})
            raise CommandError(
                f"{path} has no {options.metric!r} of {options.label!r} in metrics.jsonl yet; it has "
                f"{'rows of ' + ', '.join(labels) if labels else 'no rows at all'}."
            )
        # Equal for runs that differ only in settings irrelevant to learning.
        settings = {**asdict(folder), **asdict(folder.config)}
        experiment = {name: value for name, value in settings.items() if name not in _NOT_COMPARED}
        groups.setdefault(json.dumps(experiment), []).append((folder, curve))
    curves = {
        _name(members[0][0], len(groups)): [curve for _, curve in members] for members in groups.values()
    }
    output = Path(options.output)
    done = "replaced" if output.exists() else "written"
    draw(curves, options.metric, output)
    print(f"{len(options.runs)} runs in {output}, which was {done}")
    return 0


def draw_run(folder: RunFolder) -> Path | None:
    """Draws the greedy and acting returns of a run in `curve.png`; returns None if there are none yet."""
    curves = {}
    for name, label in (("greedy", "evaluator"), ("acting", "actor")):
        curve = read_curve(folder, label, "episode_return")
        if len(curve.x):
            curves[name] = [smooth(curve)]
    title = f"{folder.agent} in {folder.environment_name}"
    return draw(curves, "episode_return", folder.path / "curve.png", title) if curves else None


def read_curve(folder: RunFolder, label: str, metric: str) -> Curve:
    """Reads a metric of a label's rows against env steps; `actor` means all actors."""
    points: dict[float, float] = {}
    for row in read_jsonl(folder.metrics) if folder.metrics.exists() else ():
        of = str(row.get("label", ""))
        value, steps = row.get(metric), row.get("env_steps")
        fits = of == label or of.rpartition("-")[0] == label
        if fits and isinstance(steps, int | float) and isinstance(value, int | float):
            points[steps] = value  # A resumed run may have evaluated this step before.
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
    FigureCanvasAgg(figure)  # Draws without a window.
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


def _name(folder: RunFolder, experiments: int) -> str:
    name = f"{folder.agent}, {folder.environment_name}"
    return name if experiments == 1 else f"{name}, {folder.path.name}"
