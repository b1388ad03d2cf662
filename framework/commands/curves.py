"""Learning curves: metrics of a run against a count or the time, and several seeds joined to one curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from framework.commands.options import CommandError
from framework.experiments.statistics import RESAMPLES
from framework.experiments.statistics import interquartile_mean as interquartile_mean
from framework.runs.run_folder import RunFolder

Axis = Literal["steps", "updates", "hours"]
Band = Literal["std", "quartiles", "iqm"]
AXES: dict[Axis, str] = {"steps": "env steps", "updates": "learner steps", "hours": "hours"}
BANDS: dict[Band, str] = {"std": "mean ± std", "quartiles": "median (25–75 %)", "iqm": "IQM (95 % CI)"}
_GRID = 200  # Points on the x axis at which the curves of several seeds are joined.


@dataclass(frozen=True)
class Curve:
    """Values `y` `[n]` at increasing `x` `[n]`."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Joined:
    """`values` `[S, n]` of S curves at `x` `[n]`; their `center` `[n]` and its band from `low` to `high`."""

    x: np.ndarray
    values: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_curve(folder: RunFolder, label: str, metric: str, axis: Axis = "steps") -> Curve:
    """Reads a metric of a label's rows; the label `actor` means all actors.

    A resumed run repeats the steps after its checkpoint. The rows of the first attempt are left out, except
    against `hours`, because the time was spent even if its work was lost.

    Args:
      folder: the run.
      label: label of the rows, such as `evaluator`. Rows named `label-NUMBER` count, too.
      metric: name in the rows.
      axis: `steps`: env steps of the program, or learner steps where nothing acts. `updates`: learner steps;
        for evaluators and actors, those that made the parameters they act with. `hours`: wall time of the
        program, without pauses before a resume.
    """
    points: dict[tuple[str, float], float] = {}  # By label and x.
    hours = Hours()
    for row in folder.rows() if axis == "hours" else kept_rows(folder):
        at = hours.at(row)
        of = str(row.get("label", ""))
        if of != label and of.rpartition("-")[0] != label:
            continue
        updates = row.get(_learner_steps(label))
        x = at if axis == "hours" else row.get("env_steps", updates) if axis == "steps" else updates
        value = row.get(metric)
        if isinstance(x, int | float) and isinstance(value, int | float):
            points[of, x] = value
    # Rows of several actors at one x count as their mean.
    array = np.array([(x, y) for (_, x), y in points.items()], dtype=np.float64).reshape(-1, 2)
    places, where = np.unique(array[:, 0], return_inverse=True)
    return Curve(
        places, np.bincount(where, array[:, 1], len(places)) / np.bincount(where, minlength=len(places))
    )


def kept_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the rows of metrics without rows of work that was lost in a resume from a checkpoint."""
    hours, starts = Hours(), 0
    rows: list[dict[str, Any]] = []
    for row in folder.rows():
        hours.at(row)
        if row.get("resumed_at") is not None and hours.starts > starts:  # The first of this start.
            starts = hours.starts
            rows = [before for before in rows if step_of(before) <= row["resumed_at"]]
        rows.append(row)
    return rows


class Hours:
    """The time of rows, which begins at 0 with each start of the program.

    Attributes:
      starts: number of starts, after the first, that its rows so far come from.
    """

    def __init__(self) -> None:
        self.starts = 0
        self._before = self._latest = 0.0  # Seconds of the earlier starts together; of this one.
        self._resumed: set[Any] = set()  # Labels that have rows since the last resume.

    def at(self, row: dict[str, Any]) -> float | None:
        """Hours that the program had run when it wrote the row; None if the row does not say."""
        label, seconds = row.get("label"), row.get("time/wall_s")
        if not isinstance(seconds, int | float):
            seconds = None
        starts = "resumed_at" in row and (not self._resumed or label in self._resumed)
        if starts or (seconds is not None and seconds < self._latest):
            self._before += self._latest
            self._latest, self._resumed = 0.0, set()
            self.starts += 1
        if "resumed_at" in row:
            self._resumed.add(label)
        if seconds is None:
            return None
        self._latest = seconds
        return (self._before + seconds) / 3600


def step_of(row: dict[str, Any]) -> float:
    """The step of the program's clock at which a row was written; 0 if it does not say."""
    own = "steps" if str(row.get("label", "")).startswith("learner") else "learner_steps"
    return next((row[name] for name in ("env_steps", own) if row.get(name) is not None), 0)


def _learner_steps(label: str) -> str:
    return "steps" if label.startswith("learner") else "variables_version"


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


def join(curves: Sequence[Curve], band: Band = "std") -> Joined:
    """Joins the curves of several seeds, at points of x where all have data.

    Args:
      curves: at least one.
      band: `std`: mean, plus and minus one standard deviation. `quartiles`: median, 25th and 75th percentile.
        `iqm`: `interquartile_mean` and its 95 % confidence interval, by percentile bootstrap over the seeds
        (Agarwal et al., 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice").

    Raises:
      CommandError: There is no point where all curves have data.
    """
    first, last = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    if first > last:
        raise CommandError(
            f"one of {len(curves)} seeds begins at {first:g}, and another ends at {last:g}: they have no x "
            "in common. Draw them apart, or wait until all are there."
        )
    x = np.linspace(first, last, _GRID)
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    if band == "std":
        center, deviation = values.mean(0), values.std(0)
        return Joined(x, values, center, center - deviation, center + deviation)
    if band == "quartiles":
        low, center, high = np.percentile(values, (25, 50, 75), axis=0)
        return Joined(x, values, center, low, high)
    drawn = np.random.default_rng(0).integers(len(values), size=(len(values), RESAMPLES))
    low, high = np.percentile(interquartile_mean(values[drawn]), (2.5, 97.5), axis=0)
    return Joined(x, values, interquartile_mean(values), low, high)
