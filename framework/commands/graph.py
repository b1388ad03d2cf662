"""`repertory graph`: the program graph of an agent, as text and as SVG."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.commands import building
from framework.commands.options import TrainOptions, UsageError, parse
from framework.commands.train import find
from framework.programs.registry import agent_names
from framework.programs.run_config import RunConfig

_BOX = (150, 46)  # minimum width, and height, of a box
_GAP = (36, 64)  # between boxes, and between rows of boxes


@dataclass(frozen=True)
class GraphOptions:
    """Shows the nodes of an agent's program and the calls between them."""

    environment: str = TrainOptions.environment  # The environment that the agent is built for.
    num_actors: int = 2  # Number of actor nodes.
    svg: str | None = None  # Also write the picture to this file.


@dataclass(frozen=True)
class Group:
    """Nodes of one label.

    Attributes:
      label: label of the group.
      kind: type of the node or name of its constructor.
      count: number of nodes.
      uses: labels of the groups that they call.
    """

    label: str
    kind: str
    count: int
    uses: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    prog = f"repertory graph {name or 'AGENT'}"
    options = parse(GraphOptions, arguments, prog=prog)
    if name is None:
        raise UsageError(
            f"graph: got no agent, expected repertory graph AGENT, one of {', '.join(agent_names())}."
        )
    make_agent: Any = find(name).load()
    agent = make_agent()
    config = RunConfig(num_actors=options.num_actors, directory=str(Path("runs") / name))
    building.environment_spec(agent, options.environment, config)
    program = building.build_program(agent, options.environment, config)
    groups = groups_of(program)
    print(as_text(program.name, groups))
    if options.svg is not None:
        Path(options.svg).write_text(as_svg(program.name, groups), encoding="utf-8")
        print(f"\nPicture in {options.svg}")
    return 0


def groups_of(program: Any) -> list[Group]:
    """Returns the groups of a program in order of addition, with the calls between them."""
    group_of = {}
    for label, nodes in program.groups.items():
        for node in nodes:
            group_of.update({part.node_id: label for part in (node, *node.parts())})
    groups = []
    for label, nodes in program.groups.items():
        handles = [handle for node in nodes for part in (node, *node.parts()) for handle in part.handles()]
        uses = dict.fromkeys(group_of[handle.node_id] for handle in handles)
        groups.append(Group(label, nodes[0].description, len(nodes), tuple(uses)))
    return groups


def as_text(name: str, groups: Sequence[Group]) -> str:
    """Returns one line per group: the number and kind of its nodes, and the groups that they call."""
    titles = [_title(group) for group in groups]
    kinds = [group.kind for group in groups]
    wide, wider = max(map(len, titles)), max(map(len, kinds))
    lines = [f"program {name}"]
    for title, kind, group in zip(titles, kinds, groups, strict=True):
        calls = f"  ->  {', '.join(group.uses)}" if group.uses else ""
        lines.append(f"  {title:<{wide}}  {kind:<{wider}}{calls}".rstrip())
    return "\n".join(lines)


def as_svg(name: str, groups: Sequence[Group]) -> str:
    """Returns a picture with callers above the groups that they call, and an arrow for each call."""
    rows = _rows(groups)
    box = max([_BOX[0], *(_text_width(group) for group in groups)]), _BOX[1]
    width = max(len(row) for row in rows) * (box[0] + _GAP[0]) + _GAP[0]
    height = len(rows) * (box[1] + _GAP[1]) + _GAP[1]
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (box[0] + _GAP[0]) + _GAP[0]) / 2
        for column, group in enumerate(row):
            places[group.label] = (left + column * (box[0] + _GAP[0]), _GAP[1] + number * (box[1] + _GAP[1]))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="14" text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#567"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{width / 2:g}" y="28" font-size="16" font-weight="bold">{html.escape(name)}</text>',
    ]
    for group in groups:
        for used in group.uses:
            if used != group.label:
                parts.append(_arrow(_way(places, box, group.label, used)))
    for group in groups:
        parts += _box(group, box, *places[group.label])
    return "\n".join([*parts, "</svg>\n"])


def _text_width(group: Group) -> float:
    """Returns the width of the longer of a box's two lines in a sans-serif font, with a margin."""
    return max(8.5 * len(_title(group)), 6.0 * len(group.kind)) + 16


def _way(
    places: dict[str, tuple[float, float]], box: tuple[float, float], start: str, end: str
) -> list[tuple[float, float]]:
    """Returns the points of an arrow, which passes the rows in between through the nearest gap."""
    (x1, y1), (x2, y2) = places[start], places[end]
    x1, y1, x2 = x1 + box[0] / 2, y1 + box[1], x2 + box[0] / 2
    points = [(x1, y1)]
    for y in sorted({y for _, y in places.values() if y1 <= y < y2}):
        row = sorted(x for x, other in places.values() if other == y)
        straight = x1 + (x2 - x1) * (y + box[1] / 2 - y1) / (y2 - y1)
        if any(x - 8 < straight < x + box[0] + 8 for x in row):
            gaps = [row[0] - _GAP[0] / 2, *(x + box[0] + _GAP[0] / 2 for x in row)]
            straight = min(gaps, key=lambda gap: abs(gap - straight))
        points += [(straight, y), (straight, y + box[1])]
    return [*points, (x2, y2)]


def _rows(groups: Sequence[Group]) -> list[list[Group]]:
    """Returns rows of groups, the top row first; each group is above all groups that it calls."""
    by_label = {group.label: group for group in groups}
    levels: dict[str, int] = {}

    def level(label: str, above: tuple[str, ...]) -> int:
        if label not in levels:
            uses = [used for used in by_label[label].uses if used not in (*above, label)]  # a cycle ends here
            levels[label] = 1 + max((level(used, (*above, label)) for used in uses), default=-1)
        return levels[label]

    for group in groups:
        level(group.label, ())
    highest = max(levels.values())
    return [[group for group in groups if levels[group.label] == highest - row] for row in range(highest + 1)]


def _title(group: Group) -> str:
    return group.label if group.count == 1 else f"{group.label} x{group.count}"


def _box(group: Group, size: tuple[float, float], x: float, y: float) -> list[str]:
    width, height = size
    middle = x + width / 2
    shape = f'width="{width:g}" height="{height:g}" rx="6" stroke="#567"'
    behind = [f'<rect x="{x + 5:g}" y="{y - 5:g}" {shape} fill="#e3ecf4"/>']
    return [
        *(behind if group.count > 1 else []),
        f'<rect x="{x:g}" y="{y:g}" {shape} fill="#f2f7fb"/>',
        f'<text x="{middle:g}" y="{y + 20:g}">{html.escape(_title(group))}</text>',
        f'<text x="{middle:g}" y="{y + 37:g}" font-size="10" fill="#567">{html.escape(group.kind)}</text>',
    ]


def _arrow(points: list[tuple[float, float]]) -> str:
    path = f"M{points[0][0]:g} {points[0][1]:g}"
    for (x1, y1), (x2, y2) in itertools.pairwise(points):
        bend = (y2 - y1) / 2
        path += f" C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"
    return f'<path d="{path}" fill="none" stroke="#567" marker-end="url(#tip)"/>'
