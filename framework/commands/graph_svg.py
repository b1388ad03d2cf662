"""The picture of a program graph: data flows from left to right, and what flows back runs below the boxes.

```
 actor x2 ──items──▶ replay ──batches──▶ learner ──parameters──▶ evaluator
    ▲                                       │
    └───────────────parameters──────────────┘            counter · monitor · checkpointer
```

A program knows which node calls which. The direction of the data follows from their roles: an actor writes to
replay, a learner reads from it, and all others take what the node that they call has.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from framework.devices import DeviceCheck
from launch import Program

SERVICES = ("counter", "monitor", "checkpointer")
_HEIGHT, _ROW, _GAP, _MARGIN, _TOP, _LANE = 46, 74, 112, 44, 62, 26  # Sizes in pixels.


_PRIVATE = re.compile(r"\(_\w*\)")


@dataclass(frozen=True)
class Group:
    """Nodes of one label.

    Attributes:
      label: label of the group.
      kind: type of the node and name of its constructor, unless that is private.
      count: number of nodes.
      uses: labels of the groups that they call.
      devices: the devices that they use, if they are not on the CPU.
    """

    label: str
    kind: str
    count: int
    uses: tuple[str, ...]
    devices: str = ""

    @property
    def title(self) -> str:
        """The label, with the number of nodes if there are several."""
        return self.label if self.count == 1 else f"{self.label} x{self.count}"


def groups_of(program: Program) -> list[Group]:
    """Returns the groups of a program in order of addition, with the calls between them."""
    parts = {
        label: [part for node in nodes for part in (node, *node.parts())]
        for label, nodes in program.groups.items()
    }
    group_of = {part.node_id: label for label, members in parts.items() for part in members}
    groups, checks = [], [check for check in program.checks if isinstance(check, DeviceCheck)]
    wanted: dict[str, dict[str, str]] = {group: {} for check in checks for group, _, _ in check.wanted}
    for group, field, device in [each for check in checks for each in check.wanted]:
        wanted[group][field.partition(".")[2]] = device
    for label, nodes in program.groups.items():
        uses = [group_of[handle.node_id] for part in parts[label] for handle in part.handles()]
        kind = _PRIVATE.sub("", nodes[0].description)
        places = [f"{part} on {device}".strip() for part, device in wanted.get(label, {}).items()]
        devices = "" if places in ([], ["on cpu"]) else ", ".join(places)
        groups.append(Group(label, kind, len(nodes), tuple(dict.fromkeys(uses)), devices))
    return groups


@dataclass(frozen=True)
class _Edge:
    source: str
    target: str
    label: str


def as_svg(name: str, groups: Sequence[Group]) -> str:
    """Returns a picture of the groups: boxes in columns, arrows for data, and the services at the bottom."""
    main = [group for group in groups if group.label not in SERVICES]
    services = [group for group in groups if group.label in SERVICES]
    edges = _edges(main)
    columns = _columns(main, edges)
    longest = max(len(group.kind + group.devices) for group in groups)
    width = max(8.5 * max(len(group.title) for group in groups), 6 * longest, 110) + 16
    spots, filled = {}, [0] * len(groups)  # The left edge and the middle of each box; boxes in each column.
    near = {(e.source, e.target) for e in edges if columns[e.target] == columns[e.source] + 1}
    over = [e for e in edges if columns[e.target] > columns[e.source] + 1]
    under = [e for e in edges if columns[e.target] <= columns[e.source]]
    top = _TOP + _LANE * len(over)
    for group in main:
        column = columns[group.label]
        spots[group.label] = _MARGIN + column * (width + _GAP), top + filled[column] * _ROW + _HEIGHT / 2
        filled[column] += 1
    bottom = top + max(filled) * _ROW - (_ROW - _HEIGHT)
    arrows = []
    for edge in edges:
        (x1, y1), (x2, y2) = spots[edge.source], spots[edge.target]
        x1 += width
        if (edge.source, edge.target) in near:
            points = [(x1, y1), (x1 + _GAP / 2, y1), (x1 + _GAP / 2, y2), (x2, y2)]
            arrows += _arrow(points, edge.label, x2 - _GAP * (0.5 if y1 == y2 else 0.27), y2 - 6)
            continue
        # Each has a lane, and a place of its own beside the columns, between which no box is.
        lane = over.index(edge) if edge in over else under.index(edge)
        y = top - 14 - _LANE * lane if edge in over else bottom + 22 + _LANE * lane
        out, back = x1 + 14 + 7 * (lane % 4), x2 - 14 - 7 * (lane % 4)
        low = 9 if edge in under else -9  # Beside the arrows between neighbors.
        points = [(x1, y1 + low), (out, y1 + low), (out, y), (back, y), (back, y2 + low), (x2, y2 + low)]
        arrows += _arrow(points, edge.label, (out + back) / 2, y - 5)
    bottom += 18 + _LANE * len(under)
    step = width + 24
    used = max([columns[group.label] for group in main], default=0) + 1
    wide = max(2 * _MARGIN + used * width + (used - 1) * _GAP, 2 * _MARGIN + len(services) * step - 24 + 24)
    height = bottom + (34 + _HEIGHT + 34 if services else 12)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {height:g}" width="{wide:g}" '
        f'height="{height:g}" style="max-width: 100%; height: auto" font-family="sans-serif" font-size="14" '
        'text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#567"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="30" font-size="16" font-weight="bold" text-anchor="start">'
        f"{html.escape(name)}</text>",
        *arrows,
    ]
    for group in main:
        parts += _box(group, spots[group.label], width)
    if services:
        frame = f'x="{_MARGIN - 12}" y="{bottom:g}" width="{len(services) * step:g}" height="{_HEIGHT + 44}"'
        parts.append(f'<rect {frame} rx="8" fill="none" stroke="#9ab" stroke-dasharray="4 3"/>')
        parts.append(
            f'<text x="{_MARGIN}" y="{bottom + 19:g}" font-size="11" fill="#567" text-anchor="start">'
            "services, which the other nodes call</text>"
        )
        for number, group in enumerate(services):
            parts += _box(group, (_MARGIN + number * step, bottom + 30 + _HEIGHT / 2), width)
    return "\n".join([*parts, "</svg>\n"])


def _edges(groups: Sequence[Group]) -> list[_Edge]:
    """The flows of data that the calls between these groups stand for."""
    by_label = {group.label: group for group in groups}
    learners = {group.label for group in groups if "learner" in f"{group.label} {group.kind}".lower()}
    replays = {group.label for group in groups if group.kind.startswith("ReplayNode")}
    actors = {g.label for g in groups if g.label.startswith("actor") or "Actor" in g.kind}
    edges = []
    for group in groups:
        for used in group.uses:
            if used not in by_label or used == group.label:
                continue
            if used in replays and group.label not in learners:
                edges.append(_Edge(group.label, used, "items" if group.label in actors else ""))
            elif used in replays:
                edges.append(_Edge(used, group.label, "batches"))
            elif group.label in learners:
                edges.append(_Edge(used, group.label, "samples" if used in actors else ""))
            else:
                kind = f"{used} {by_label[used].kind}".lower()
                parameters = "parameters" if used in learners or "source" in kind else ""
                edges.append(_Edge(used, group.label, "actions" if "inference" in kind else parameters))
    return edges


def _columns(groups: Sequence[Group], edges: Sequence[_Edge]) -> dict[str, int]:
    """The column of each group: right of what it takes data from, except that what acts is on the left."""
    takes: dict[str, set[str]] = {group.label: set() for group in groups}
    act = {edge.source for edge in edges if edge.label in ("items", "samples")}
    for edge in edges:
        if edge.label not in ("parameters", "actions") or edge.target not in act:
            takes[edge.target].add(edge.source)
    columns: dict[str, int] = {}

    def column_of(label: str, path: tuple[str, ...]) -> int:
        if label not in columns:
            sources = takes[label] - {*path, label}  # In a circle, the first one is on the left.
            column = max((column_of(each, (*path, label)) + 1 for each in sorted(sources)), default=0)
            if path:
                return column
            columns[label] = column
        return columns[label]

    for group in groups:
        column_of(group.label, ())
    return columns


def _arrow(points: Sequence[tuple[float, float]], label: str, x: float, y: float) -> list[str]:
    path = " ".join(f"{'L' if number else 'M'}{px:g} {py:g}" for number, (px, py) in enumerate(points))
    text = f'<text x="{x:g}" y="{y:g}" font-size="11" fill="#567">{label}</text>'
    line = f'<path d="{path}" fill="none" stroke="#567" stroke-linejoin="round" marker-end="url(#tip)"/>'
    return [line, text] if label else [line]


def _made_by(group: Group) -> str:
    """The class that makes the node's object, or the kind of a node that is more than a service."""
    kind, _, constructor = group.kind.rstrip(")").partition("(")
    if kind == "ReplayNode":
        return kind
    return group.kind if kind != "CourierNode" else constructor if constructor[:1].isupper() else ""


def _box(group: Group, spot: tuple[float, float], width: float) -> list[str]:
    x, y = spot[0], spot[1] - _HEIGHT / 2
    shape = f'width="{width:g}" height="{_HEIGHT}" rx="6" stroke="#567"'
    behind = [f'<rect x="{x - 5:g}" y="{y - 5:g}" {shape} fill="#e3ecf4"/>']
    middle, made_by = x + width / 2, html.escape(f"{_made_by(group)} {group.devices}".strip())
    return [
        *(behind if group.count > 1 else []),
        f'<rect x="{x:g}" y="{y:g}" {shape} fill="#f2f7fb"/>',
        f'<text x="{middle:g}" y="{y + 20:g}">{html.escape(group.title)}</text>',
        f'<text x="{middle:g}" y="{y + 37:g}" font-size="10" fill="#567">{made_by}</text>',
    ]
