"""The nodes of a program by label, and which of them call which."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launch import Program

_PRIVATE = re.compile(r"\(_\w*\)")


@dataclass(frozen=True)
class Group:
    """Nodes of one label.

    Attributes:
      label: label of the group.
      kind: type of the node and name of its constructor, unless that is private.
      count: number of nodes.
      uses: labels of the groups that they call.
    """

    label: str
    kind: str
    count: int
    uses: tuple[str, ...]

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
    groups = []
    for label, nodes in program.groups.items():
        uses = [group_of[handle.node_id] for part in parts[label] for handle in part.handles()]
        kind = _PRIVATE.sub("", nodes[0].description)
        groups.append(Group(label, kind, len(nodes), tuple(dict.fromkeys(uses))))
    return groups
