"""`repertory report`: a page about runs in one file, or a folder with a policy as model hubs take it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from framework import interrupts
from framework.commands import hub_folder, plot, report_page
from framework.commands.curves import Curve, Hours, kept_rows, read_curve, smooth
from framework.commands.options import Allow, Checkpoint, UsageError, parse
from framework.commands.video import FORMATS, frames, write_video
from framework.programs.loading import LoadedPolicy, evaluated_or_latest, load_policy
from framework.runs import config_file
from framework.runs.run_folder import RunError, RunFolder
from launch.errors import message_of
from launch.texts import rounded

_SUFFIXES = (".html", ".htm")
_FILM_STEPS = 1_000  # A recorded episode ends after this number of steps at the latest.


@dataclass(frozen=True)
class ReportOptions:
    """Writes a page about runs in one file, with curves, a table, videos, settings and versions.

    Runs that differ only in their seed are one experiment. With --folder, writes what a model hub takes.
    """

    # Folders of runs.
    runs: tyro.conf.Positional[tuple[Annotated[str, tyro.conf.arg(metavar="RUN")], ...]]
    # The page, an .html file, which is replaced if it exists. By default report.html; none beside --folder.
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    # A new folder with the policy of one run: parameters, settings, the exported policy, a curve, a video,
    # and README.md with a hub's metadata. `load_policy(FOLDER)` acts with it. Nothing is uploaded.
    folder: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    # An episode of the run with the best last return of each experiment: the video in the run's folder if no
    # checkpoint is newer, or a new one.
    video: bool = True
    # The policy: best (as evaluated during the run), latest, previous, or a step. By default best, and
    # latest if nothing was evaluated.
    checkpoint: Checkpoint = None
    allow: Allow = ()  # A module whose objects the run may name. Give it once for each module.


def main(arguments: Sequence[str]) -> int:
    options = parse(ReportOptions, arguments, prog="repertory report")
    if not options.runs:
        raise UsageError("report: got no runs, expected repertory report RUN [RUN ...].")
    groups = plot.experiments(options.runs)
    count = sum(map(len, groups.values()))
    if options.folder is not None and count != 1:
        raise UsageError(f"--folder: got {count} runs, expected the one whose policy it is to hold.")
    output = Path(options.output or f"report{_SUFFIXES[0]}")
    if output.suffix not in _SUFFIXES:
        raise UsageError(f"--output: got {output}, expected a name that ends in {' or '.join(_SUFFIXES)}.")
    if options.folder is not None:
        hub_folder.check(Path(options.folder))
    interrupts.clean_up_first()
    experiments = [_experiment(name, runs, options) for name, runs in groups.items()]
    for each in experiments:
        if each.why_no_film and options.video:
            print(f"{each.name}: no video: {each.why_no_film}")
    if options.folder is not None:
        (run,), (about,) = next(iter(groups.values())), experiments
        policy = _policy(run, options)
        hub_folder.write(Path(options.folder), run, policy, about.runs[0], about.film)
        print(f"the policy of step {policy.step:,} is in {options.folder}, from which load_policy acts")
    if options.folder is None or options.output is not None:
        done = "replaced" if output.exists() else "written"
        output.parent.mkdir(parents=True, exist_ok=True)
        config_file.replace(output, report_page.page(experiments))
        print(f"{count} run{'s' if count > 1 else ''} in {output}, which was {done}")
    return 0


def _experiment(name: str, runs: list[RunFolder], options: ReportOptions) -> report_page.Experiment:
    """What the page says about runs that differ only in their seed."""
    returns = {
        what: curves
        for what, label in (("greedy", "evaluator"), ("acting, with exploration", "actor"))
        if (curves := _curves(runs, label, "episode_return"))
    }
    rows = [row for run in runs for row in kept_rows(run) if _is_learners(row)]
    metrics = sorted({key for row in rows for key, value in row.items() if _is_metric(key, value)})
    best = max(runs, key=_last_return)
    settings = hub_folder.shared_settings(best)
    recorded = settings.pop(config_file.RECORDED)
    film: tuple[str, bytes] | str = _film(best, options) if options.video else "--no-video was given."
    return report_page.Experiment(
        name,
        returns,
        {metric: curves for metric in metrics if (curves := _curves(runs, "learner", metric))},
        [_facts(run) for run in runs],
        config_file.dump(settings),
        _made_with(best, recorded),
        None if isinstance(film, str) else film,
        film if isinstance(film, str) else "",
    )


def _curves(runs: Sequence[RunFolder], label: str, metric: str) -> list[Curve]:
    curves = [smooth(read_curve(run, label, metric), 200) for run in runs]
    return [curve for curve in curves if len(curve.x)]


def _is_metric(name: str, value: Any) -> bool:
    counts = ("label", "steps", "version", "env_steps", "learner_steps", "resumed", "resumed_at")
    return name not in counts and not name.startswith("time/") and isinstance(value, int | float)


def _is_learners(row: dict[str, Any]) -> bool:
    return str(row.get("label")).startswith("learner")


def _last_return(run: RunFolder) -> float:
    curve = read_curve(run, "evaluator", "episode_return")
    return float(curve.y[-1]) if len(curve.y) else float("-inf")


def _facts(run: RunFolder) -> dict[str, str]:
    """A row of the table of runs."""
    rows, hours, greedy = kept_rows(run), Hours(), read_curve(run, "evaluator", "episode_return")
    learned = [row.get("steps" if _is_learners(row) else "learner_steps") or 0 for row in rows]
    spent = max((at for row in run.rows() if (at := hours.at(row)) is not None), default=0.0)
    result, evaluation = (
        hub_folder.read_json(run, "result.json"),
        hub_folder.read_json(run, "evaluation.json"),
    )
    played = ""
    if evaluation:
        played = f"{rounded(evaluation['mean'], 1)} ± {rounded(evaluation['standard_deviation'], 1)}"
        played += f" over {evaluation['episodes']} episodes, at step {evaluation['step']:,}"
    best = int(greedy.y.argmax()) if len(greedy.y) else None
    state = "running" if run.lock.pid() is not None else "interrupted"
    return {
        "run": run.path.resolve().name,
        "seed": str(run.config.seed),
        "env steps": f"{max((row.get('env_steps') or 0 for row in rows), default=0):,}",
        "learner steps": f"{max(learned, default=0):,}",
        "minutes": rounded(60 * spent, 1),
        "last greedy return": "" if best is None else rounded(greedy.y[-1], 1),
        "best": "" if best is None else f"{rounded(greedy.y[best], 1)} at step {int(greedy.x[best]):,}",
        "evaluation": played,
        "ended by": str(result.get("reason", state)),
    }


def _made_with(run: RunFolder, recorded: dict[str, Any]) -> dict[str, str]:
    """The versions and commits of the run's first start."""
    commits = {f"commit of {name.replace('_', ' ')}": text for name, text in recorded["git_commit"].items()}
    start = {"started": recorded["started_at"], "engine": run.engine}
    return {name: str(text) for name, text in {**start, **recorded["versions"], **commits}.items()}


def _policy(run: RunFolder, options: ReportOptions) -> LoadedPolicy:
    return load_policy(run.path, options.checkpoint or evaluated_or_latest(run.path), options.allow)


def _film(run: RunFolder, options: ReportOptions) -> tuple[str, bytes] | str:
    """The suffix and the bytes of a video, or why there is none."""
    newest = run.checkpointer.latest()
    for suffix in FORMATS if options.checkpoint is None else ():
        file = run.path / f"video{suffix}"
        if file.is_file() and not (newest and newest.stat().st_mtime > file.stat().st_mtime):
            with open(file, "rb", opener=config_file.no_link) as content:
                return suffix, content.read()
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"video{FORMATS[0]}"
        try:
            policy = _policy(run, options)
            write_video(file, frames(policy, 1, _FILM_STEPS, 0), 30)
        except RunError as error:
            return str(error)
        except Exception as error:  # A simulator may fail in any way where there is no display.
            return f"{type(error).__name__}: {message_of(error)}"
        return file.suffix, file.read_bytes()
