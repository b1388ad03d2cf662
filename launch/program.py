"""A program: groups of nodes, joined by the handles in their arguments."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from launch.handles import Handle
from launch.nodes import ProgramNode

_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*\Z")


@dataclass
class ProgramState:
    """The state of a program on the serial engine between two turns.

    Attributes:
      objects: the nodes' objects, by label.
      states: the nodes' states, as in `Job.status()`, by label.
      turns: the number of turns of each node, by label.
      order: labels of the workers, in the order of the last pass.
      due: labels of the workers that still wait for their turn in that pass.
      stop_handlers: handlers that the nodes registered.
    """

    objects: dict[str, Any]
    states: dict[str, str]
    turns: dict[str, int]
    order: list[str]
    due: list[str]
    stop_handlers: list[Callable[[], Any]]


class ProgramSnapshot(Protocol):
    """Keeps the state of an interrupted program of the serial engine."""

    def save(self, state: ProgramState) -> None:
        """Called when the program is interrupted, before its nodes are closed."""

    def load(self) -> ProgramState | None:
        """Called instead of the nodes' constructors, which are called if it returns None."""


class Program:
    """A description of what to run; nothing runs before `launch.launch(program)`.

    ```python
    program = lp.Program("parameter_server")
    server = program.add_node(lp.CourierNode(Server), label="server")
    with program.group("worker"):
        for seed in range(4):
            program.add_node(lp.CourierNode(Worker, server, seed))
    ```
    """

    #: From it and its label, each node in a process of its own derives the seed of the global random
    #: generators of Python, NumPy and torch. None: another seed in every run. On `serial`, the program has
    #: generators of its own that begin with it; None: it draws from the caller's, as on `threads`.
    seed: int | None = None
    #: Keeps the state of an interrupted program of the serial engine; None keeps none.
    snapshot: ProgramSnapshot | None = None
    #: Seconds for which a group with `min_nodes` may have fewer nodes, if `launch` is not given others.
    min_nodes_timeout: float = 300.0
    #: Modules that processes are forked with, unless `launch` is given others; None as there.
    preload: Sequence[str] | None = None
    #: Functions that return context managers. The launching process enters them before it makes the first
    #: node, and exits them when all nodes have ended. If one gives a file, such as a lock, the engine
    #: "processes" keeps it open in all processes, which may outlive the launching one.
    contexts: Sequence[Callable[[], contextlib.AbstractContextManager[Any]]] = ()
    #: Functions of the `Job`, which the launching process calls when it has started the program.
    when_started: Sequence[Callable[[Any], object]] = ()
    #: Functions of the engine and the `Options` that raise what would end the program at its start. They are
    #: called before `contexts`.
    checks: Sequence[Callable[[str, Any], object]] = ()

    def __init__(self, name: str) -> None:
        if not name:
            raise ValueError("Program(name): got an empty string, expected a name.")
        #: By group, fields of `Resources`; those given to `launch` replace them.
        self.resources: Mapping[str, Mapping[str, Any]] = {}
        #: By group, the `strategy` of `Resources` that holds unless its resources have another.
        self.strategies: Mapping[str, str] = {}
        #: By group, the number of nodes with which the program goes on; those given to `launch` replace them.
        self.min_nodes: Mapping[str, int] = {}
        #: By group, seconds that its nodes have to return and to close, where they need more than
        #: `stop_timeout`.
        self.stop_timeouts: Mapping[str, float] = {}
        self.name = name
        self.groups: dict[str, list[ProgramNode]] = {}
        self._members: list[tuple[str, int, ProgramNode]] = []
        self.current_group: str | None = None

    @contextlib.contextmanager
    def group(self, label: str) -> Iterator[None]:
        """Adds the nodes of the `with` block to this group. An existing group may be opened again."""
        _check_label(label)
        if self.current_group is not None:
            raise ValueError(
                f"group({label!r}): group {self.current_group!r} is open, and groups cannot be nested."
            )
        self.current_group = label
        try:
            yield
        finally:
            self.current_group = None

    def add_node(self, node: ProgramNode, label: str | None = None) -> Handle:
        """Adds a node to the open group, or to the group `label`.

        Returns:
          The handle that represents the node in the arguments of other nodes.

        Raises:
          ValueError: The label is missing outside a group or differs from the open group's, or a node
            that serves calls is already in a program. A node that serves nothing may be added again; a copy
            of it runs.
          TypeError: `node` is not a `ProgramNode`.
        """
        if self.current_group is not None and label not in (None, self.current_group):
            raise ValueError(
                f"add_node(label={label!r}): the group {self.current_group!r} is open. Leave out the label."
            )
        group = self.current_group or label
        if group is None:
            raise ValueError(
                'add_node(label): got none, expected label="..." or an open group: with program.group("...").'
            )
        _check_label(group)
        if not isinstance(node, ProgramNode):
            raise TypeError(f"add_node(node): got {node!r}, expected a node such as lp.CourierNode(...).")
        if node in self.get_all_nodes() and node.serves is None and not node.parts():
            node = node.copy()  # runs once more, as in Launchpad; a node that serves has only one address
        for part in (node, *node.parts()):
            part.claim()
        nodes = self.groups.setdefault(group, [])
        self._members.append((group, len(nodes), node))
        nodes.append(node)
        return node.create_handle()

    def get_all_nodes(self) -> list[ProgramNode]:
        """Returns the nodes in order of addition."""
        return [node for _, _, node in self._members]

    def members(self) -> list[tuple[str, int, ProgramNode]]:
        """Returns `(group, index in the group, node)` in order of addition."""
        return list(self._members)


def _check_label(label: str) -> None:
    if not isinstance(label, str) or not _LABEL.match(label):
        raise ValueError(
            f"label: got {label!r}, expected letters, digits, '_' and '.', and no '.' at the start. The "
            "label names the log file."
        )
