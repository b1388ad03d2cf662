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
from framework.commands.graph_groups import Group, groups_of
from framework.commands.graph_svg import as_svg
from framework.commands.options import TrainOptions, UsageError, parse
from framework.commands.train import default_environment, find
from framework.runs.presets import Preset, presets_of
from framework.runs.registry import agent_names
from framework.runs.run_config import Inference, RunConfig
from launch import Program


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


def main(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    prog = f"repertory graph {name or 'AGENT'}"
    options = parse(GraphOptions, arguments, prog=prog)
    if name is None:
        raise UsageError(
            f"graph: got no agent, expected repertory graph AGENT, one of {', '.join(agent_names())}."
        )
    groups = groups_of(build(name, options))
    print({"text": as_text, "svg": as_svg, "mermaid": as_mermaid}[options.format](name, groups))
    if options.svg is not None:
        Path(options.svg).write_text(as_svg(name, groups), encoding="utf-8")
        if options.format == "text":
            print(f"\nPicture in {options.svg}")
    return 0


def build(name: str, options: GraphOptions) -> Program:
    """The program of the agent `name` that `repertory train` would make with these options.

    Raises:
      CommandError: There is no such agent, or `repertory train` would refuse to start it here.
    """
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
    return building.build_program(agent, environment, run, TrainOptions.engine)


def as_text(name: str, groups: Sequence[Group]) -> str:
    """Returns one line per group: the number and kind of its nodes, and the groups that they call."""
    titles = [group.title for group in groups]
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
    boxes = [f'  {ids[group.label]}["{group.title}<br/>{html.escape(group.kind)}"]' for group in groups]
    arrows = [f"  {ids[group.label]} --> {ids[used]}" for group in groups for used in group.uses]
    return "\n".join(["---", f"title: {name}", "---", "flowchart TD", *boxes, *arrows])
