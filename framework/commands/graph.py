"""`repertory graph`: the program graph of an agent, as text, SVG or Mermaid."""

from __future__ import annotations

import dataclasses
import html
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from framework.commands import building
from framework.commands.crossing import crossed_bytes
from framework.commands.graph_svg import Group, as_svg, groups_of
from framework.commands.options import UsageError
from framework.commands.train import parse_new
from framework.runs.registry import agent_names
from framework.torch_agents import TorchAgent


@dataclass(frozen=True)
class GraphOptions:
    """What `repertory graph` takes beside the flags of `repertory train`."""

    # What to print: text; svg, a picture; mermaid, a diagram for Markdown pages.
    format: Literal["text", "svg", "mermaid"] = "text"
    svg: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None  # Also write the picture to this file.


def main(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if name is None and {"-h", "--help"} & {*arguments}:
        print(
            "usage: repertory graph AGENT [--format text|svg|mermaid] [--svg FILE] [flags of train]\n"
            f"\nagents: {', '.join(agent_names())}"
        )
        return 0
    if name is None:
        raise UsageError(
            f"graph: got no agent, expected repertory graph AGENT, one of {', '.join(agent_names())}."
        )
    groups, options = build(name, arguments[1:])
    print({"text": as_text, "svg": as_svg, "mermaid": as_mermaid}[options.format](name, groups))
    if options.svg is not None:
        Path(options.svg).write_text(as_svg(name, groups), encoding="utf-8")
        if options.format == "text":
            print(f"\nPicture in {options.svg}")
    return 0


def build(name: str, arguments: Sequence[str] = ()) -> tuple[list[Group], GraphOptions]:
    """The groups of the program that `repertory train` would make with these arguments, and other options.

    Raises:
      CommandError: There is no such agent, or `repertory train` would refuse to start it here.
    """
    entry, options, config, agent_config, own = parse_new(name, arguments, "graph", GraphOptions())
    agent = entry.make(agent_config)
    with tempfile.TemporaryDirectory() as folder:  # A run has one, and with it a checkpointer.
        config = dataclasses.replace(config, directory=folder)
        spec = building.environment_spec(agent, options.environment, config)
        building.check_agent(agent, spec)
        groups = groups_of(building.build_program(agent, options.environment, config, options.engine))
    if isinstance(agent, TorchAgent) and getattr(agent.config, "devices", {}):
        told = f"; {crossed_bytes(agent, spec, config.num_envs):,} bytes cross per learner step"
        own_devices = {group.label: group.devices + told * (group.label == "learner") for group in groups}
        groups = [dataclasses.replace(group, devices=own_devices[group.label]) for group in groups]
    return groups, own


def as_text(name: str, groups: Sequence[Group]) -> str:
    """Returns one line per group: the number and kind of its nodes, and the groups that they call."""
    titles = [group.title for group in groups]
    kinds = [group.kind for group in groups]
    wide, wider = max(map(len, titles)), max(map(len, kinds))
    lines = [f"program {name}"]
    for title, kind, group in zip(titles, kinds, groups, strict=True):
        calls = f"  ->  {', '.join(group.uses)}" if group.uses else ""
        lines.append(f"  {title:<{wide}}  {kind:<{wider}}{calls}".rstrip())
        if group.devices:
            lines.append(f"  {'':<{wide}}  {group.devices}")
    return "\n".join(lines)


def as_mermaid(name: str, groups: Sequence[Group]) -> str:
    """Returns a Mermaid flowchart: a box per group, and an arrow from each caller to what it calls."""
    ids = {group.label: f"n{number}" for number, group in enumerate(groups)}
    boxes = [
        f'  {ids[group.label]}["{group.title}<br/>{html.escape(f"{group.kind} {group.devices}".strip())}"]'
        for group in groups
    ]
    arrows = [f"  {ids[group.label]} --> {ids[used]}" for group in groups for used in group.uses]
    return "\n".join(["---", f"title: {name}", "---", "flowchart TD", *boxes, *arrows])
