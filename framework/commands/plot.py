"""`repertory plot`: learning curves of runs, joined over runs that differ only in their seed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from framework.commands.curves import AXES, BANDS, Axis, Band, Curve, join, read_curve, smooth
from framework.commands.options import CommandError, UsageError, parse
from framework.commands.shown import Shown
from framework.config_checks import RaisedAs
from framework.runs.run_folder import RunFolder
from launch.texts import rounded

# Settings in which runs of one experiment may differ.
_NOT_COMPARED = {
    "seed",
    "directory",
    "keep_checkpoints",
    "checkpoint_period",
    "checkpoint_minutes",
    "restarts",
}
_NOT_COMPARED |= {"restarts", "loggers", "resources", "learner_threads", "config", "agent_config"}
_NOT_COMPARED |= {"max_env_steps", "max_learner_steps", "target_return", "evaluate_period"}
_PLACES = 200  # Points of a curve; more are averaged.
# Rows of a label: how its actions were chosen.
_ACTIONS = {"evaluator": "greedy", "actor": "acting, with exploration"}


@dataclass(frozen=True)
class PlotOptions:
    """Draws the learning curves of runs; runs that differ only in their seed become one curve with a band."""

    # Folders of runs.
    runs: tyro.conf.Positional[tuple[Annotated[str, tyro.conf.arg(metavar="RUN")], ...]]
    # The picture: png, svg or pdf; png without a suffix. An existing file is replaced.
    output: Annotated[str, tyro.conf.arg(metavar="FILE")] = "curves.png"
    metric: str = "episode_return"  # The metric on the y axis.
    # Labels of the rows: evaluator, learner, actor. Several with commas between them make several curves.
    label: str = "evaluator"
    # The x axis: env steps, learner steps, or hours of wall time.
    x: Axis = "steps"
    # What the band of several seeds shows: mean and standard deviation, median and quartiles, or the
    # interquartile mean with its bootstrapped 95 % confidence interval.
    band: Band = "std"
    table: bool = False  # Also prints the last values as a Markdown table, and writes it beside the picture.


def main(arguments: Sequence[str]) -> int:
    options = parse(PlotOptions, arguments, prog="repertory plot")
    if not options.runs:
        raise UsageError("plot: got no runs, expected repertory plot RUN [RUN ...].")
    output = Path(options.output)
    if not output.suffix:
        output = Path(f"{output}.png")  # Matplotlib would add it, too.
    done = "replaced" if output.exists() else "written"
    groups, curves, what = _draw(options, output)
    count = sum(map(len, groups.values()))
    print(f"{count} run{'s' if count > 1 else ''} in {output}, which was {done}")
    for name, members in curves.items():
        least, most = (end(curve.x[-1] for curve in members) for end in (min, max))
        if most > 1.05 * least:  # Averages end a little before the last row.
            least, most = (rounded(at, 3 if options.x == "hours" else 0) for at in (least, most))
            print(f"{name}: ends with its shortest run at {least} of {most}")
    if options.table:
        text = as_table(curves, what, options.x, options.band)
        output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
        print(text)
    return 0


def plot(
    runs: Any,
    output: str | os.PathLike[str] = "curves.png",
    *,
    metric: str = "episode_return",
    label: str = "evaluator",
    x: Axis = "steps",
    band: Band = "std",
) -> Shown:
    """Draws learning curves as `repertory plot` does, and returns the picture's path, which a notebook shows.

    Args:
      runs: a `Run`, the folder of one, or several of these. Runs that differ only in their seed become one
        curve with a band.
      output: the picture: .png, .svg or .pdf. An existing file is replaced.
      metric: the metric on the y axis.
      label: what wrote its rows: `evaluator`, `learner`, `actor`. Several with commas make several curves.
      x: `steps`: env steps. `updates`: learner steps. `hours`: wall time.
      band: of several seeds: `std`, `quartiles`, or `iqm`; see `curves.join`.

    Raises:
      RunError: There are no runs, or one of them has no such rows.
      ValueError: `x` or `band` has another value.
    """
    each = [runs] if isinstance(runs, str | os.PathLike) or hasattr(runs, "folder") else list(runs)
    if not each:
        raise CommandError("runs: got none, expected a run, the folder of one, or several of them.")
    for name, value, known in (("x", x, AXES), ("band", band, BANDS)):
        if value not in known:
            raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}.")
    paths = tuple(os.fspath(getattr(run, "folder", run)) for run in each)
    _draw(PlotOptions(paths, metric=metric, label=label, x=x, band=band), Path(output))
    return Shown(output)


def _draw(
    options: PlotOptions, output: Path
) -> tuple[dict[str, list[RunFolder]], dict[str, list[Curve]], str]:
    """Draws the runs in `output`; returns them by experiment, the curves, and the label of the y axis."""
    groups = experiments(options.runs)
    labels = list(dict.fromkeys(label.strip() for label in options.label.split(",")))
    if not all(labels):
        raise UsageError(f"--label: got {options.label!r}, expected labels with commas between them.")
    curves = {
        f"{name}, {_ACTIONS.get(label, label)}" if len(labels) > 1 else name: [
            _read(folder, label, options) for folder in members
        ]
        for name, members in groups.items()
        for label in labels
    }
    what = options.metric.replace("_", " ")
    if len(labels) == 1 and labels[0] in _ACTIONS:
        what += f" ({_ACTIONS[labels[0]]})"
    draw(curves, what, output, axis=options.x, band=options.band)
    return groups, curves, what


def experiments(paths: Sequence[str]) -> dict[str, list[RunFolder]]:
    """The runs in `paths`, each once, by the name of their experiment, whatever their seed."""
    groups: dict[str, list[RunFolder]] = {}
    for path in {Path(path).resolve(): path for path in paths}.values():
        folder = RunFolder.open(path)
        groups.setdefault(json.dumps(_settings(folder)), []).append(folder)
    return dict(zip(_names([json.loads(group) for group in groups]), groups.values(), strict=True))


def draw_run(folder: RunFolder, output: Path | None = None) -> Path | None:
    """Draws the greedy and acting returns of a run, by default in `curve.png`; None if there are none yet."""
    curves = {}
    for name, label in (("greedy", "evaluator"), ("acting", "actor")):
        curve = read_curve(folder, label, "episode_return")
        if len(curve.x):
            curves[name] = [smooth(curve)]
    title = f"{folder.agent} in {folder.environment_name}"
    path = output or folder.path / "curve.png"
    return Shown(draw(curves, "episode return", path, title)) if curves else None


def draw(
    curves: dict[str, list[Curve]],
    what: str,
    output: Path,
    title: str = "",
    axis: Axis = "steps",
    band: Band = "std",
) -> Path:
    """Draws each entry as one curve in a file; see `draw_in`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # Draws without a window.
    draw_in(figure.add_subplot(), curves, what, title, axis, band)
    output.parent.mkdir(parents=True, exist_ok=True)
    with RaisedAs(UsageError, ValueError, f"--output {output}: "):
        figure.savefig(output, dpi=120)
    return output


def draw_in(
    axes: Any,
    curves: dict[str, list[Curve]],
    what: str,
    title: str = "",
    axis: Axis = "steps",
    band: Band = "std",
) -> None:
    """Draws each entry as one curve, with a band if it has several seeds; `what` labels the y axis.

    `axes` are matplotlib's.
    """
    for name, members in curves.items():
        # Matplotlib hides labels that begin with `_`, as the names of a notebook's agents (`__main__:`) do.
        name = f" {name}" if name.startswith("_") else name
        if len(members) == 1:
            marker = "o" if len(members[0].x) < 30 else None
            axes.plot(members[0].x, members[0].y, label=name, marker=marker, markersize=3)
            continue
        joined = join(members, band)
        (line,) = axes.plot(joined.x, joined.center, label=f"{name} ({len(members)} seeds)")
        axes.fill_between(joined.x, joined.low, joined.high, alpha=0.2, color=line.get_color())
    axes.set_xlabel(AXES[axis])
    several = any(len(members) > 1 for members in curves.values())
    axes.set_ylabel(f"{what}: {BANDS[band]}" if several else what)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()


def as_table(curves: dict[str, list[Curve]], what: str, axis: Axis, band: Band) -> str:
    """Returns the values at the last x that all seeds of a curve have reached, as a table in Markdown."""
    lines = [f"| curve | seeds | {AXES[axis]} | {what}: {BANDS[band]} | min … max |", "|---|---|---|---|---|"]
    for name, members in curves.items():
        joined = join(members, band)
        last, center, low, high = (float(v[-1]) for v in (joined.x, joined.center, joined.low, joined.high))
        spread = f" ± {high - center:.4g}" if band == "std" else f" ({low:.4g} … {high:.4g})"
        spread = spread if len(members) > 1 else ""  # One seed says nothing of others.
        least, most = joined.values[:, -1].min(), joined.values[:, -1].max()
        text = name.replace("|", "\\|").replace("__", "\\_\\_")  # Markdown would print a bold `main`.
        lines.append(
            f"| {text} | {len(members)} | {rounded(last, 3 if axis == 'hours' else 0)} "
            f"| {center:.4g}{spread} | {least:.4g} … {most:.4g} |"
        )
    return "\n".join(lines)


def _read(folder: RunFolder, label: str, options: PlotOptions) -> Curve:
    """Reads a curve; raises CommandError if the run has none."""
    curve = read_curve(folder, label, options.metric, options.x)
    if len(curve.x):
        return smooth(curve, _PLACES)
    names: dict[str, set[str]] = {}
    for row in folder.rows():
        names.setdefault(str(row.get("label")).partition("-")[0], set()).update(row)
    metrics = sorted(names.get(label, set()) - {"label"})
    raise CommandError(
        f"{folder.path} has no {options.metric!r} of {label!r} against {AXES[options.x]} in metrics.jsonl "
        f"yet; it has {'rows of ' + ', '.join(sorted(names)) if names else 'no rows at all'}."
        + (f" Those of {label!r} have {', '.join(metrics)}." if metrics else "")
    )


def _settings(folder: RunFolder) -> dict[str, Any]:
    """The settings that are relevant to learning: equal for runs of one experiment."""
    settings = {**asdict(folder), **asdict(folder.config)}
    # Fields of the agent's config with the names of other settings.
    own = {f"agent_config.{k}" if k in settings else k: v for k, v in folder.agent_config.items()}
    return {name: value for name, value in {**settings, **own}.items() if name not in _NOT_COMPARED}


def _names(experiments: Sequence[dict[str, Any]]) -> list[str]:
    """Names experiments by agent and environment, and by the settings in which those with one name differ."""
    names: list[str] = []
    for mine in experiments:
        name = f"{mine['agent']}, {mine['environment'] or 'an environment of its own'}"
        for key, value in mine.items():
            alike = (
                o
                for o in experiments
                if (o["agent"], o["environment"]) == (mine["agent"], mine["environment"])
            )
            if key != "environment_spec" and any(other.get(key) != value for other in alike):
                name += f", {key}={value}"
        if name in names:  # Their environments have other specs.
            name += f" ({len(names) + 1})"
        names.append(name)
    return names
