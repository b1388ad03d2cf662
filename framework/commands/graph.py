"""`repertory graph`: the program graph of an agent, as text, SVG or Mermaid."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from framework.commands import building
from framework.commands.options import UsageError, parse
from framework.commands.train import default_environment, find
from framework.runs.presets import Preset, presets_of
from framework.runs.registry import agent_names
from framework.runs.run_config import Inference, RunConfig
from launch import Program

_BOX_HEIGHT, _ROW, _MARGIN, _TOP = 46, 68, 36, 64  # Sizes in the picture, in pixels.


@dataclass(frozen=True)
class GraphOptions:
    """Shows the nodes of an agent's program and the calls between them."""

    # The environment that the agent is built for. The default is `repertory train`'s.
    environment: Annotated[str | None, tyro.conf.arg(metavar="SUITE:NAME")] = None
    num_actors: int = 2  # Number of actor nodes.
    num_learners: int = RunConfig.num_learners  # Number of learner nodes.
    replay_shards: int = RunConfig.replay_shards  # Number of replay nodes.
    variable_sources: int = RunConfig.variable_sources  # Number of variable-source nodes.
    inference: Inference = RunConfig.inference  # Where actions come from.
    inference_nodes: int = RunConfig.inference_nodes  # Number of inference nodes.
    # What to print: text; svg, a picture; mermaid, a diagram for Markdown pages.
    format: Literal["text", "svg", "mermaid"] = "text"
    svg: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None  # Also write the picture to this file.


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
    entry = find(name)
    environment = options.environment or default_environment(entry)
    config = entry.make_config()
    preset = presets_of(entry.load()).get(environment, Preset()).agent
    agent = entry.make(None if config is None else dataclasses.replace(config, **preset))
    counts = ("num_actors", "num_learners", "replay_shards", "variable_sources", "inference_nodes")
    settings = {field: getattr(options, field) for field in (*counts, "inference")}
    envs = 2 if options.inference == "alternating+server" else 1
    try:
        run = RunConfig(envs_per_actor=envs, directory=str(Path("runs") / name), **settings)
    except ValueError as error:
        raise UsageError(str(error)) from error
    building.check_agent(agent, building.environment_spec(agent, environment, run))
    program = building.build_program(agent, environment, run)
    groups = groups_of(program)
    print({"text": as_text, "svg": as_svg, "mermaid": as_mermaid}[options.format](program.name, groups))
    if options.svg is not None:
        Path(options.svg).write_text(as_svg(program.name, groups), encoding="utf-8")
        if options.format == "text":
            print(f"\nPicture in {options.svg}")
    return 0


def groups_of(program: Program) -> list[Group]:
    """Returns the groups of a program in order of addition, with the calls between them."""
    parts = {
        label: [part for node in nodes for part in (node, *node.parts())]
        for label, nodes in program.groups.items()
    }
    group_of = {part.node_id: label for label, members in parts.items() for part in members}
    groups = []
    for label, nodes in program.groups.items():
        uses = [group_of[handle.node_id] for part in parts[label] for handle in part.handles()]
        groups.append(Group(label, nodes[0].description, len(nodes), tuple(dict.fromkeys(uses))))
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


def as_mermaid(name: str, groups: Sequence[Group]) -> str:
    """Returns a Mermaid flowchart: a box per group, and an arrow from each caller to what it calls."""
    ids = {group.label: f"n{number}" for number, group in enumerate(groups)}
    boxes = [f'  {ids[group.label]}["{_title(group)}<br/>{html.escape(group.kind)}"]' for group in groups]
    arrows = [f"  {ids[group.label]} --> {ids[used]}" for group in groups for used in group.uses]
    return "\n".join(["---", f"title: {name}", "---", "flowchart TD", *boxes, *arrows])


def as_svg(name: str, groups: Sequence[Group]) -> str:
    """Returns a picture: callers above the groups that they call, and an arc on the right for each call."""
    shown = list(reversed(groups))
    # The wider of a box's two lines in a sans-serif font.
    texts = [max(8.5 * len(_title(group)), 6.0 * len(group.kind)) for group in shown]
    box, height = max([150.0, *texts]) + 16, _TOP + len(shown) * _ROW
    tops = {group.label: _TOP + row * _ROW for row, group in enumerate(shown)}
    arcs, widest = [], 0.0
    for group in shown:
        for used in group.uses:
            if used == group.label:
                continue
            x, y1, y2 = _MARGIN + box, tops[group.label] + 34, tops[used] + 12
            reach = 20 + abs(y2 - y1) / 2.5
            widest = max(widest, reach)
            path = f"M{x:g} {y1:g} C{x + reach:g} {y1:g} {x + reach:g} {y2:g} {x:g} {y2:g}"
            arcs.append(f'<path d="{path}" fill="none" stroke="#567" marker-end="url(#tip)"/>')
    width = 2 * _MARGIN + box + widest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="14" text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#567"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN + box / 2:g}" y="34" font-size="16" font-weight="bold">'
        f"{html.escape(name)}</text>",
        *arcs,
    ]
    for group in shown:
        parts += _box(group, box, tops[group.label])
    return "\n".join([*parts, "</svg>\n"])


def _title(group: Group) -> str:
    return group.label if group.count == 1 else f"{group.label} x{group.count}"


def _box(group: Group, width: float, y: float) -> list[str]:
    middle = _MARGIN + width / 2
    shape = f'width="{width:g}" height="{_BOX_HEIGHT}" rx="6" stroke="#567"'
    behind = [f'<rect x="{_MARGIN - 5}" y="{y - 5:g}" {shape} fill="#e3ecf4"/>']
    return [
        *(behind if group.count > 1 else []),
        f'<rect x="{_MARGIN}" y="{y:g}" {shape} fill="#f2f7fb"/>',
        f'<text x="{middle:g}" y="{y + 20:g}">{html.escape(_title(group))}</text>',
        f'<text x="{middle:g}" y="{y + 37:g}" font-size="10" fill="#567">{html.escape(group.kind)}</text>',
    ]
