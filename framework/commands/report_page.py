"""The page of `repertory report`: one file of HTML that names no other, for light and dark screens."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from framework.commands import plot
from framework.commands.curves import Curve

_INK = "#010203"  # Drawn with this color, and shown with the page's.
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --quiet: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
svg, video, img { max-width: 100%; height: auto; }
.beside { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 1fr); gap: 1.5rem; }
.beside { align-items: center; }
.wide { overflow-x: auto; }
@media (max-width: 50rem) { .beside { grid-template-columns: minmax(0, 1fr); } }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .3rem .7rem; text-align: left; }
tr { border-bottom: 1px solid var(--line); } td { font-variant-numeric: tabular-nums; }
pre { background: var(--quiet); padding: 1rem; overflow-x: auto; font-size: .8rem; }
summary { cursor: pointer; font-weight: 600; } details { margin: .6rem 0; } figure { margin: 0; }
"""


@dataclass(frozen=True)
class Experiment:
    """Runs that differ only in their seed.

    Attributes:
      name: the agent, the environment, and the settings in which it differs from others.
      returns: by what acted, the curves of all seeds; the greedy ones first.
      metrics: by metric of the learner, the curves of all seeds.
      runs: a row of the table for each run.
      settings: of the run with the best last return, as YAML.
      made_with: versions and commits.
      film: suffix and bytes of a video; None without.
      why_no_film: the reason, then.
    """

    name: str
    returns: dict[str, list[Curve]]
    metrics: dict[str, list[Curve]]
    runs: list[dict[str, str]]
    settings: str
    made_with: dict[str, str]
    film: tuple[str, bytes] | None
    why_no_film: str


def page(experiments: Sequence[Experiment]) -> str:
    """The text of the file."""
    alone = len(experiments) == 1
    title = experiments[0].name if alone else f"{len(experiments)} experiments"
    returns: dict[str, list[Curve]] = {}
    metrics: dict[str, dict[str, list[Curve]]] = {}
    for each in experiments:
        for what, curves in list(each.returns.items())[: None if alone else 1]:
            returns[what if alone else each.name] = curves
        for metric, curves in each.metrics.items():
            if any(len(set(curve.y)) > 1 for curve in curves):  # Others would be straight lines.
                metrics.setdefault(metric, {})[each.name] = curves
    body = [f"<h1>{escape(title)}</h1>"]
    drawn = svg({"episode return": returns}) if returns else "<p>No returns were logged yet.</p>"
    films = "".join(_film(each, alone) for each in experiments)
    body.append(f'<div class="beside"><figure>{drawn}</figure><div>{films}</div></div>')
    body.append(_table([row for each in experiments for row in each.runs]))
    if metrics:
        body.append(f"<h2>Learner</h2>{svg(metrics, columns=3)}")
    body.append("<h2>Settings and versions</h2>")
    for each in experiments:
        versions = [{"made with": name, "version": text} for name, text in each.made_with.items()]
        body.append(
            f"<details><summary>{escape(each.name)}</summary><p>To repeat the run, save these lines in a "
            f"FILE: <code>repertory train --config FILE</code></p><pre>{escape(each.settings)}</pre>"
            f"{_table(versions)}</details>"
        )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(body)}</body></html>\n"
    )


def svg(panels: dict[str, dict[str, list[Curve]]], columns: int = 1) -> str:
    """A picture with a panel for each metric, whose ink has the color of the text around it."""
    import matplotlib
    from matplotlib.figure import Figure

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    style: dict[Any, Any] = {**dict.fromkeys(ink, _INK), "svg.fonttype": "none", "axes.facecolor": "none"}
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context({**style, "legend.framealpha": 0.0, "font.size": 10 if columns == 1 else 8}):
        figure = Figure(
            (8, 4.5) if columns == 1 else (12, 2.4 * rows), layout="constrained", facecolor="none"
        )
        for place, (what, curves) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, columns, place)
            plot.draw_in(axes, curves, what)
            if columns > 1:
                axes.set(title=what, xlabel="", ylabel="")
                axes.legend().set_visible(place == 1 and len(curves) > 1)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue().replace(_INK, "currentColor")
    return f'<div role="img" aria-label="{escape(", ".join(panels))}">{drawn[drawn.index("<svg") :]}</div>'


def _film(each: Experiment, alone: bool) -> str:
    caption = "" if alone else f"<figcaption>{escape(each.name)}</figcaption>"
    if each.film is None:
        return f"<figure>{caption}<p>No video: {escape(each.why_no_film)}</p></figure>"
    suffix, content = each.film
    data = base64.b64encode(content).decode()
    if suffix == ".gif":
        return f'<figure>{caption}<img alt="An episode" src="data:image/gif;base64,{data}"></figure>'
    source = f'src="data:video/mp4;base64,{data}"'
    return f"<figure>{caption}<video controls loop muted autoplay playsinline {source}></video></figure>"


def _table(rows: Sequence[dict[str, str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    lines = ["".join(f"<td>{escape(text)}</td>" for text in row.values()) for row in rows]
    cells = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{cells}</table></div>'
