"""The process that runs ``lp.launch``: Launchpad takes over signals, flags and the exit of its process, and
kills it when a node is slow to end, so this is not the process of the user.

It is told everything by a file, and by its standard input: a line ends the program, the end of the input
(the user's process has died) ends it by force.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any

from launch.engines._launchpad_node import Host, NativeTables, Wiring, read_unit, run_host


@dataclass(frozen=True)
class Part:
    """One node. ``kind`` is "courier", "reverb" or "plain"; ``calls`` are the nodes it has handles of."""

    node_id: int
    kind: str
    calls: tuple[int, ...]
    has_checkpointer: bool


@dataclass(frozen=True)
class Plan:
    """What to launch: ``units`` are ``(group, pickled unit, parts)``.

    ``environments`` are the variables of each group's processes.
    """

    name: str
    launch_type: str
    units: tuple[tuple[str, bytes, tuple[Part, ...]], ...]
    wiring: Wiring
    environments: dict[str, dict[str, str]]


def build(plan: Plan) -> Any:
    """The ``launchpad.Program``."""
    import launchpad as lp

    nodes: dict[int, Any] = {}
    handles: dict[int, Any] = {}
    # Handles first: nodes may refer to each other in circles.
    for _, unit, parts in plan.units:
        for position, part in enumerate(parts):
            if part.kind == "courier":
                nodes[part.node_id] = lp.CourierNode(Host, unit, position, plan.wiring, {})
            elif part.kind == "reverb":
                checkpointer = NativeTables(unit, position, checkpointer=True)
                nodes[part.node_id] = lp.ReverbNode(
                    NativeTables(unit, position), checkpointer if part.has_checkpointer else None
                )
            else:
                continue
            handles[part.node_id] = nodes[part.node_id].create_handle()
    program = lp.Program(plan.name)
    for group, unit, parts in plan.units:
        for position, part in enumerate(parts):
            peers = {number: handles[number] for number in part.calls if number in handles}
            arguments = (unit, position, plan.wiring, peers)
            if part.kind == "courier":
                nodes[part.node_id].configure(*arguments)
            elif part.kind == "plain":
                nodes[part.node_id] = lp.PyNode(run_host, *arguments)
        members = [nodes[part.node_id] for part in parts]
        with program.group(group):
            program.add_node(members[0] if len(members) == 1 else lp.MultiThreadingColocation(members))
    return program


def main(path: str) -> None:
    with open(path, "rb") as file:
        plan: Plan = pickle.load(file)
    os.unlink(path)
    import launchpad as lp
    from absl import flags

    flags.FLAGS(["launchpad"])
    threading.Thread(target=_obey, name="launch-driver", daemon=True).start()
    if plan.launch_type == "local_mt":
        for _, unit, _ in plan.units:
            # Its imports are over before there are threads, which import more as they begin. What fails here
            # fails again in the node, which says so.
            with contextlib.suppress(Exception):
                read_unit(unit)
    resources = None
    if plan.launch_type == "local_mp":
        from launchpad.nodes.python.local_multi_processing import PythonProcess

        resources = {group: PythonProcess(env=env) for group, env in plan.environments.items()}
    manager = lp.launch(
        build(plan), launch_type=plan.launch_type, local_resources=resources, terminal="output_to_files"
    )
    manager.wait(raise_error=False)
    sys.stdout.flush()
    os._exit(0)  # past Launchpad's exit hooks, which wait for nodes that have ended


def _obey() -> None:
    for _ in sys.stdin:
        # What Launchpad's own program stopper does.
        os.kill(os.getpid(), signal.SIGTERM)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # Nodes are pickled: their classes must not be of a module called __main__.
    from launch.engines import _launchpad_driver

    _launchpad_driver.main(sys.argv[1])
