"""What ``compare.py`` measures of Repertory."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.common import Rate, cpu_seconds, rss
from framework import replay
from framework.datasets import Dataset
from framework.types import Transition
from launch.rpc.sockets import CurveKeys

CAPACITY = 100_000
BATCH = 256


@dataclasses.dataclass
class Run:
    """``call`` handles ``items``; ``close`` is called when it was measured."""

    call: Callable[[], Any]
    items: int
    close: Callable[[], Any] = lambda: None
    runs: int = 3
    pids: Sequence[int] = ()


def columns(n: int, shape: Sequence[int] = (4,), dtype: Any = np.float32, both: bool = True) -> dict:
    """Rows of transitions."""
    rng = np.random.default_rng(0)
    observation = rng.integers(0, 255, (n, *shape), np.uint8).astype(dtype)
    rows = {
        "observation": observation,
        "action": np.ones(n, np.int64),
        "reward": np.ones(n, np.float32),
        "discount": np.ones(n, np.float32),
    }
    return {**rows, "next_observation": observation} if both else rows


def transition(writer: Any, rows: np.ndarray) -> Transition:
    """The items whose rows hold both observations."""
    return Transition(
        *[writer.slice("steps", name, rows) for name in ("observation", "action", "reward", "discount")],
        writer.slice("steps", "next_observation", rows),
        (),
    )


def table(size: int, sampler: Any = None) -> replay.Table:
    return replay.Table(
        "t",
        sampler or replay.selectors.Uniform(),
        replay.selectors.Fifo(),
        size,
        replay.rate_limiters.MinSize(1),
        seed=0,
    )


def write(writer: Any, data: dict, priorities: np.ndarray | None = None) -> None:
    rows = writer.append("steps", data)
    writer.create_items("t", transition(writer, rows), priorities)
    writer.release("steps", rows)


def fill(client: Any, size: int, shape: Sequence[int] = (4,), dtype: Any = np.float32) -> Any:
    """A writer that has put ``size`` items in."""
    writer = client.batch_writer()
    block = max(1, min(4096, (64 << 20) // int(np.prod(shape))))
    rng = np.random.default_rng(0)
    for begin in range(0, size, block):
        n = min(block, size - begin)
        write(writer, columns(n, shape, dtype), rng.random(n) + 0.01)
    writer.flush()
    return writer


def trajectory_writer() -> Run:
    """Two steps an item, observations stored once."""
    client = replay.EmbeddedClient([table(CAPACITY)])
    fill(client, 1000)
    writer = client.trajectory_writer(2)
    row = {"observation": np.zeros(4, np.float32), "action": np.int64(1), "reward": np.float32(1)}
    writer.append(row)

    def call() -> None:
        writer.append(row)
        writer.create_item("t", 1.0, {name: column[-2:] for name, column in writer.history.items()})
        writer.flush(20)

    return Run(call, 1, client.close)


def batch_writer(envs: int) -> Run:
    """Into a full table: each item evicts one."""
    client = replay.EmbeddedClient([table(CAPACITY)])
    writer = fill(client, CAPACITY)
    data = columns(envs)
    return Run(lambda: write(writer, data), envs, client.close)


def uniform(shape: Sequence[int], dtype: str, size: int) -> Run:
    client = replay.EmbeddedClient([table(size)])
    fill(client, size, shape, dtype)
    sample = client.sample_batch("t", BATCH)
    out = [leaf for leaf in sample.data if isinstance(leaf, np.ndarray)]
    return Run(lambda: client.sample_batch("t", BATCH, out=out), BATCH, client.close)


def prioritized(size: int) -> Run:
    client = replay.EmbeddedClient([table(size, replay.selectors.Prioritized(0.6))])
    fill(client, size)
    rng = np.random.default_rng(0)
    fresh = [rng.random(BATCH) + 0.01 for _ in range(64)]
    turn = iter(range(1 << 62))

    def call() -> None:
        sample = client.sample_batch("t", BATCH)
        client.update_priorities("t", sample.info.key, fresh[next(turn) % 64])

    return Run(call, BATCH, client.close)


def sequences(frames: int, bare: bool = False) -> Run:
    """Items of 80 frames, one beginning at each 40th; ``bare`` takes rows of items drawn as ours are."""
    batch, length = 32, 80
    frames = max(frames, 1000)
    client = replay.EmbeddedClient([table(frames)])
    writer = client.batch_writer()
    data = np.random.default_rng(0).integers(0, 255, (frames, 84, 84), np.uint8)
    rows = writer.append("steps", {"observation": data})
    begins = np.arange(0, frames - length, 40)
    index = rows[begins[:, None] + np.arange(length)]
    if bare:
        out = np.empty((batch, length, 84, 84), np.uint8)
        rng = np.random.default_rng(0)
        return Run(
            lambda: data.take(index[rng.integers(0, len(index), batch)], 0, out, "clip"), batch, client.close
        )
    writer.create_items("t", {"observation": writer.slice("steps", "observation", index)})
    out = [client.sample_batch("t", batch).data["observation"]]
    return Run(lambda: client.sample_batch("t", batch, out=out), batch, client.close)


class Served:
    """Servers in processes of their own and clients in others.

    Each client samples from all servers, or writes to one of them, as the nodes of a program with shards do:
    "fetch" is through a ``Dataset``, "sample" with ``sample_batch``.
    """

    def __init__(self, kind: str, way: str, clients: int, shards: int = 1):
        self._context = multiprocessing.get_context("spawn")
        keys = CurveKeys.generate() if way == "remote" else None
        self._pipes, self._servers, addresses = [], [], []
        for _ in range(shards):
            pipe, theirs = self._context.Pipe()
            server = self._context.Process(target=_serve, args=(theirs, keys, shards), daemon=True)
            server.start()
            theirs.close()
            self._pipes.append(pipe)
            self._servers.append(server)
            addresses.append(pipe.recv())
        self._arguments = (kind, way, addresses, keys)
        self._clients = clients

    def measure(self, seconds: float) -> Rate:
        pids = [server.pid for server in self._servers]
        return measure_clients(self._context, _use, self._arguments, self._clients, seconds, pids)

    def close(self) -> None:
        for pipe, server in zip(self._pipes, self._servers, strict=True):
            pipe.send(None)
            server.join(30)


def measure_clients(
    context: Any, use: Any, arguments: tuple, clients: int, seconds: float, pids: list
) -> Rate:
    """What ``clients`` processes that run ``use(pipe, *arguments, number)`` do together."""
    pipes, processes = [], []
    for number in range(clients):
        ours, theirs = context.Pipe()
        process = context.Process(target=use, args=(theirs, *arguments, number), daemon=True)
        process.start()
        theirs.close()  # so that a process that dies is an EOFError here
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()  # ready
    pids = [*pids, *[process.pid for process in processes]]
    cpu = wall = 0.0
    for _ in range(3):
        begin, started = sum(map(cpu_seconds, pids)), time.perf_counter()
        for pipe in pipes:
            pipe.send(seconds)
        items = sum(pipe.recv() for pipe in pipes)
        cpu = max(cpu, items / (sum(map(cpu_seconds, pids)) - begin))
        wall = max(wall, items / (time.perf_counter() - started))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(30)
    return Rate(cpu, wall)


def answer(pipe: Any, call: Callable[[], Any], items: int) -> None:
    """The client's side of ``measure_clients``."""
    call()
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        done, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            call()
            done += items
        pipe.send(done)


def _serve(pipe: Any, keys: CurveKeys | None, shards: int) -> None:
    size = CAPACITY // shards
    server = replay.Server([table(size)], curve=keys)
    fill(server.localhost_client(), size).close()
    pipe.send(server.address)
    pipe.recv()
    server.stop()


def _use(pipe: Any, kind: str, way: str, addresses: list[str], keys: CurveKeys | None, number: int) -> None:
    local = False if way == "remote" else None
    connect = functools.partial(replay.Client, curve=keys, local=local)
    client: Any
    if kind != "insert" and len(addresses) > 1:
        client = replay.ShardedClient([connect(address) for address in addresses])
    else:
        client = connect(addresses[number % len(addresses)])
    if kind == "sample":
        answer(pipe, lambda: client.sample_batch("t", BATCH), BATCH)
    elif kind == "fetch":
        with Dataset(client, "t", BATCH) as dataset:
            answer(pipe, lambda: next(dataset), BATCH)
    else:
        writer = client.batch_writer(max_in_flight_items=16 * BATCH)
        data = columns(BATCH)
        answer(pipe, lambda: write(writer, data), BATCH)
        writer.close()
    client.close()


def checkpoint(megabytes: int, way: str) -> Run:
    """Frames of 28 kB; the unit is MB."""
    folder = tempfile.mkdtemp(prefix="replay-benchmark-")
    size = megabytes * 1_000_000 // (84 * 84 * 4)
    first = replay.EmbeddedClient(
        [table(size)], checkpointer=replay.checkpointers.DefaultCheckpointer(folder)
    )
    writer = first.batch_writer()
    for begin in range(0, size, 1024):
        data = columns(min(1024, size - begin), (4, 84, 84), np.uint8, both=False)
        rows = writer.append("steps", data)
        writer.create_items("t", {name: writer.slice("steps", name, rows) for name in data})
        writer.release("steps", rows)
    first.checkpoint()

    def load() -> None:
        checkpointer = replay.checkpointers.DefaultCheckpointer(folder)
        replay.EmbeddedClient([table(size)], checkpointer=checkpointer).close()

    call = first.checkpoint if way == "save" else load
    return Run(call, megabytes, lambda: (first.close(), shutil.rmtree(folder)), runs=1)


def memory_small() -> str:
    """Each item has rows of its own: 36 bytes of observations, action, reward and discount and 16 more."""
    client = replay.EmbeddedClient([table(CAPACITY)])
    fill(client, 1)
    before = rss()
    fill(client, CAPACITY)
    payload = sum(array[:1].nbytes for array in columns(1).values())
    return f"{(rss() - before) / CAPACITY:,.0f} ({payload} of data)"


def memory_atari() -> str:
    """Frames stacked by four, each frame stored once; transitions hold both stacks."""
    size = 10_000
    client = replay.EmbeddedClient([table(size)])
    writer = client.batch_writer()
    before = rss()
    last = np.zeros(0, np.int64)
    for _ in range(size // 50):  # few at a time: what is passed in is memory too
        data = columns(50, (84, 84), np.uint8, both=False)
        rows = np.concatenate([last, writer.append("steps", data)])
        ends = np.arange(4, len(rows))
        stacks = rows[ends[:, None] + np.arange(-4, 1)]
        item = {
            "observation": writer.slice("steps", "observation", stacks[:, :4].copy()),
            "next_observation": writer.slice("steps", "observation", stacks[:, 1:].copy()),
            "action": writer.slice("steps", "action", stacks[:, 3].copy()),
        }
        writer.create_items("t", item)
        writer.release("steps", rows[:-4])
        last = rows[-4:]
    items = len(client.tables["t"])
    return f"{(rss() - before) / items:,.0f} ({(rss() - before) / items / 7056:.3f} x 7056)"
