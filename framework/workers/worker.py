"""What the workers of programs share: their `Setup`, their base class, and seeds."""

from __future__ import annotations

import ctypes
import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import launch
from framework import core
from framework.clock import Clock
from framework.environments.base import BatchedEnvironment
from framework.replay import Table
from framework.replay.contracts import ReplayClient
from framework.replay.errors import ServerClosed
from framework.replay.sharded import shard_of
from framework.runs.run_config import RunConfig
from framework.specs import EnvironmentSpec
from launch import platforms
from launch.context import find_context
from launch.seeds import seed_generators

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # The numbers are those in malloc.h.
# Reverb's limiters without a bound use the largest float64.
BOUNDLESS = 10**15


@dataclasses.dataclass
class Setup:
    """What every worker of a program is made from.

    Attributes:
      agent: makes the parts in the nodes.
      make_environment: `(num_envs, seed) -> BatchedEnvironment`.
      spec: the `EnvironmentSpec` of one env.
      config: the run's settings.
      evaluators: names of the program's evaluators. Without any, the actors end the program.
      clock: what the program counts.
    """

    agent: core.Agent
    make_environment: Callable[[int, int], BatchedEnvironment]
    spec: EnvironmentSpec
    config: RunConfig
    evaluators: list[str] = dataclasses.field(default_factory=list)
    clock: Clock = dataclasses.field(default_factory=Clock)


class ProgramWorker(core.Worker):
    """A worker that may finish before the program is stopped; see `finished`."""

    _finished = False

    def finished(self) -> bool:
        """Whether the work is done. The serial engine then stops calling `step`."""
        return self._finished

    def run(self) -> None:
        """Steps until the work is done or the program is stopped. A stop also ends a wait on replay."""
        stopped = launch.stop_event()
        while not (stopped.is_set() or self._finished):
            try:
                self.step()
            except ServerClosed as error:
                if stopped.is_set():
                    return
                if not self.recover(error):
                    raise

    def recover(self, error: ServerClosed) -> bool:
        """Recovers from the loss of a replay server during a step; returns whether stepping can continue."""
        return False


def derive_seed(seed: int, part: str) -> int:
    """A seed for `part`, such as `"actor-3"`: independent of other parts, and equal on every engine."""
    return int(np.random.SeedSequence([seed, zlib.crc32(part.encode())]).generate_state(1)[0])


def next_seed(seed: int, state: Mapping[str, Any] | None) -> int:
    """The seed of a worker with the saved `state`.

    With its first seed, a worker that continues would repeat the episodes of the beginning.
    """
    made = 0 if state is None else int(state["steps"])
    return derive_seed(seed, f"after-{made}") if made else seed


def make_tables(setup: Setup, seed: int, shards: int = 1) -> list[Table]:
    """The agent's tables, seeded; one of several servers' with `shards` above 1."""
    tables = setup.agent.make_tables(setup.spec)
    if shards > 1:
        tables = [shard_of(table, shards) for table in tables]
    for table in tables:
        table.set_seed(derive_seed(seed, table.name))
    return tables


def describe_tables(replay: ReplayClient) -> str:
    """What each table holds and has made, and the numbers of its limiter."""
    texts = []
    for info in replay.server_info(timeout=1).values():
        limiter = info.rate_limiter_info
        texts.append(
            f"table {info.name!r} holds {info.current_size:,} items after {limiter.insert_stats.completed:,} "
            f"inserts and {limiter.sample_stats.completed:,} samples, with min_size_to_sample "
            f"{limiter.min_size_to_sample:,}, samples_per_insert {limiter.samples_per_insert:g}, min_diff "
            f"{limiter.min_diff:g}, and max_diff {limiter.max_diff:g}"
        )
    return "; ".join(texts)


def prepare_process(seed: int) -> None:
    """Prepares a process or thread for a node: sets torch to one thread and float32, and seeds generators.

    More threads make small networks slower, and processes that share cores much slower: `OMP_NUM_THREADS`
    gives another number, and the engine sets it for a group with more threads. With several nodes in one
    process, the last call determines the result. On the engine `threads` the generators of Python, NumPy and
    torch stay the caller's. The engines give the caller's settings back.
    """
    platforms.limit_torch()
    torch.set_default_dtype(torch.float32)
    node = find_context()
    if node is None or node.engine != "threads":
        seed_generators(seed)


def keep_freed_memory() -> None:
    """Keeps freed blocks of memory of up to 32 MB in this process, instead of returning them to the system.

    A learner on the CPU allocates the same large arrays at each step. By default each is mapped again, and
    clearing its pages took a fifth of a step with images. Only for glibc; has no effect elsewhere.
    """
    if not platforms.has("mallopt"):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # The largest value that it accepts.
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 64 << 20)


def is_elastic(config: RunConfig) -> bool:
    """Whether actors may be lost or missing: within one process they cannot."""
    node = find_context()
    return config.min_actors is not None and node is not None and node.engine not in ("serial", "threads")
