"""Which of several nodes a worker of a program uses: handles that stand for a group of nodes."""

from __future__ import annotations

import concurrent.futures
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import launch
from framework.replay import ShardedClient

# Seconds for the first answer of a variable source, and for the others'.
_NEAREST_S, _REST_S = 60.0, 5.0


def member(handle: launch.Handle | None, index: int) -> launch.Handle | None:
    """The node that the worker `index` uses, of those that `handle` represents."""
    return None if handle is None else handle.members()[index % len(handle.members())]


def nearest(variables: launch.Handle | None, index: int) -> launch.Handle | None:
    """The variable source that the worker `index` uses: one on its machine, if there is one."""
    if variables is None or len(handles := variables.members()) == 1:
        return variables
    first = index % len(handles)
    return launch.HandleGroup([*handles[first:], *handles[:first]], _connect_nearest)


def _connect_nearest(handles: Sequence[launch.Handle]) -> Any:
    """A client of the source on this machine; if there is none, of one that answers."""
    clients, node = [handle.dereference() for handle in handles], launch.get_node_context()
    if node.engine != "ray":  # There is one machine.
        return clients[0]
    hosts = {client.futures.host(): client for client in clients}
    # All sources that are there answer at about the same time; a lost one never answers.
    done, rest = concurrent.futures.wait(hosts, _NEAREST_S, concurrent.futures.FIRST_COMPLETED)
    done |= concurrent.futures.wait(rest, _REST_S).done
    there = {hosts[future]: future.result() for future in done if future.exception() is None}
    near = [client for client, host in there.items() if host == node.host]
    return next((client for client in clients if client in (near or there)), clients[0])


class LearnerHandle(launch.HandleGroup):
    """Represents one of the learners in a node."""

    def __init__(self, node: launch.Handle, name: str) -> None:
        super().__init__([node], functools.partial(_connect_learner, name))
        self._is = node.node_id, name

    def __reduce__(self) -> Any:
        return LearnerHandle, (self.members()[0], self._is[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LearnerHandle) and other._is == self._is

    def __hash__(self) -> int:
        return hash(self._is)


class LearnerClient:
    """A client of one of the learners in a node. Each call says its name."""

    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, name

    @property
    def futures(self) -> LearnerClient:
        return LearnerClient(self._client.futures, self._name)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(getattr(self._client, method), learner=self._name)


def _connect_learner(name: str, handles: Sequence[launch.Handle]) -> LearnerClient:
    return LearnerClient(handles[0].dereference(), name)


def connect_shards(seed: int, handles: Sequence[launch.Handle]) -> ShardedClient:
    return ShardedClient([handle.dereference() for handle in handles], seed=seed)


def connect_one(handles: Sequence[launch.Handle]) -> Any:
    """A client of one of the nodes, another one in each node that asks."""
    label = launch.get_node_context().label
    return handles[zlib.crc32(label.encode()) % len(handles)].dereference()
