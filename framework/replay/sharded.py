"""Several replay servers, on one or several machines, behind one client.

```python
client = ShardedClient(["host-a:8000", "host-b:8000"], curve=keys)
```

Each writer writes to one server, because an item's rows must be in one store. Writers are spread over the
servers. Samples are drawn from all servers, so that each item is as likely as if all were in one table: the
number of samples from a server is proportional to the size of its table or, if the sampler is `Prioritized`,
to the sum of its weights. A server whose rate limiter allows fewer gives fewer, and the others more.
Before each batch the client asks all servers for these numbers at once, and then for their samples.

A `Dataset` that fetches ahead gets the numbers with the samples, and each message brings samples for several
batches: a server is asked when less than its part of a batch is left of what it has sent. Numbers and samples
are then older, by as many batches as are fetched ahead, and by 32 if no batch needed the server. This is not
done near the limits of a rate limiter, for tables whose items leave after some samples, or for large items.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from framework import nest as nests
from framework.replay.base import BaseClient
from framework.replay.batches import JoinedSource
from framework.replay.client import Client
from framework.replay.errors import DeadlineExceededError
from framework.replay.remote.ahead import AheadSource
from framework.replay.remote.client import SINGLES, SINGLES_BYTES, ServedSource
from framework.replay.reverb_api.client import ReverbApi
from framework.replay.tables.rate_limiters import RateLimiter
from framework.replay.tables.table import Table
from framework.replay.types import CallStats, Drawn, Out, Sample, TableInfo, check_keys, check_priorities
from framework.replay.writer import SHARD_SHIFT, BatchWriter
from launch.rpc.sockets import CurveKeys

_SHIFT = np.uint64(SHARD_SHIFT)
_KEY = np.uint64((1 << SHARD_SHIFT) - 1)  # the bits of a server's own keys
MAX_SHARDS = 32
# Samples that are kept count for the rate limiter: one message brings at most this part of what it allows.
_LIMITER_PARTS = 32
# Samples that are kept are copied a second time, into their batch. In larger batches, messages cost less.
_KEPT_BYTES = 1 << 20
_SUMMED = (
    "current_size",
    "num_episodes",
    "num_deleted_episodes",
    "num_unique_samples",
    "max_size",
    "sampled_age",
)


def shard_of(table: Table, shards: int) -> Table:
    """Returns an empty table that holds one of `shards` equal parts of the items of `table`.

    Its sizes and the window of its rate limiter are divided. `shards` of them together keep the ratio of
    samples to inserts as exactly as `table` does, unless that made the window too narrow for one insert.
    """
    limiter = table.rate_limiter
    low = limiter.min_diff / shards
    # In a window of less than one insert and one sample, both sides may have to wait for each other.
    least = min(limiter.max_diff - limiter.min_diff, limiter.samples_per_insert + 1)
    divided = RateLimiter(
        limiter.samples_per_insert,
        math.ceil(limiter.min_size_to_sample / shards),
        low,
        max(limiter.max_diff / shards, low + least),
    )
    size = math.ceil(table.max_size / shards)
    if limiter.max_diff <= limiter.samples_per_insert * table.max_size:  # as of a queue, which loses no items
        size = max(size, math.ceil(divided.max_diff / limiter.samples_per_insert))
    return table.replace(max_size=size, rate_limiter=divided)


class ShardedClient(ReverbApi, BaseClient):
    """A client of several servers with tables of the same names; see the module docstring.

    Args:
      servers: addresses or clients.
      curve: the keys of the servers given by address.
      seed: seed of the random numbers that split a batch among the servers.
    """

    def __init__(
        self, servers: Sequence[Any], *, curve: CurveKeys | None = None, seed: int | None = None
    ) -> None:
        if not 1 <= len(servers) <= MAX_SHARDS:
            raise ValueError(f"servers: got {len(servers)}, expected 1 to {MAX_SHARDS}.")
        self.shards = [Client(each, curve=curve) if isinstance(each, str) else each for each in servers]
        self.concurrent = all(shard.concurrent for shard in self.shards)
        self._seed = seed
        self._turn = secrets.randbelow(len(servers)) if seed is None else seed
        self._turning = threading.Lock()
        self._idle: collections.deque[ShardedSource] = collections.deque()  # which `sample_batch` uses

    def batch_writer(self, max_in_flight_items: int | None = None) -> BatchWriter:
        """Returns a writer to one of the servers, the next in turn; `shard` is its number."""
        with self._turning:
            shard, self._turn = self._turn % len(self.shards), self._turn + 1
        writer: BatchWriter = self.shards[shard].batch_writer(max_in_flight_items)
        writer.shard = shard
        return writer

    def source(self) -> ShardedSource:
        """Returns the source that a `Dataset` draws from."""
        return ShardedSource(self, self._seed)

    @contextlib.contextmanager
    def _reader(self) -> Iterator[ShardedSource]:
        try:
            source = self._idle.pop()
        except IndexError:  # every other one is in use by another thread
            source = self.source()
        try:
            yield source
        finally:
            self._idle.append(source)

    def single_samples(self, table: str, n: int, timeout: float | None = None) -> Iterator[Sample]:
        with self._reader() as source:
            try:
                most = SINGLES
                for done in range(n):
                    source.spare = min(done, n - done - 1, most)
                    sample, drawn = source.draw(table, 1, timeout, None, False)
                    source.release(drawn)
                    num_bytes = sum([leaf.nbytes for leaf in nests.flatten(sample.data)[0]])
                    most = min(SINGLES, SINGLES_BYTES // max(1, num_bytes))
                    yield sample
            finally:
                source.give_stock_back()

    def _mutate(self, table: str, keys: Any, priorities: Any, deletes: Any) -> None:
        keys, deletes = check_keys(table, keys), check_keys(table, deletes)
        priorities = check_priorities(table, priorities, len(keys))  # before any server changes an item
        for shard, mine in self._split(deletes):
            shard.mutate_priorities(table, deletes=(deletes[mine] & _KEY).tolist())
        for shard, mine in self._split(keys):
            shard.update_priorities(table, keys[mine] & _KEY, priorities[mine])

    def _split(self, keys: np.ndarray) -> list[tuple[Any, np.ndarray]]:
        """Returns the clients of the servers that have any of the keys, with the positions of those keys."""
        numbers = (keys >> _SHIFT) & np.uint64(MAX_SHARDS - 1)
        places = [(shard, np.flatnonzero(numbers == n)) for n, shard in enumerate(self.shards)]
        return [(shard, mine) for shard, mine in places if len(mine)]

    def can_sample(self, table: str, n: int = 1) -> bool:
        """Returns whether every server that holds items has `n`: then a draw does not wait for any share."""
        filled = [shard for shard in self.shards if shard.server_info()[table].current_size]
        return bool(filled) and all(shard.can_sample(table, n) for shard in filled)

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Returns whether every server takes `n` items now."""
        return all(shard.can_insert(table, n) for shard in self.shards)

    def reset(self, table: str) -> None:
        """Removes every item of a table on all servers."""
        for shard in self.shards:
            shard.reset(table)

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """Returns each table's counts, summed over the servers; `shards` has each server's.

        `why_not_sample` is empty if a server gives a sample. `why_not_insert` comes from the first server
        that takes no item: its writers wait.
        """
        infos = [shard.server_info(timeout) for shard in self.shards]
        return {name: _add([info[name] for info in infos]) for name in infos[0]}

    def checkpoint(self) -> list[str]:
        """Writes a checkpoint on every server; returns their paths there."""
        return [shard.checkpoint() for shard in self.shards]

    def interrupt(self) -> None:
        """Ends every waiting call with `ServerClosed`."""
        for shard in self.shards:
            shard.interrupt()

    def close(self) -> None:
        """Closes this client and the clients of its servers."""
        for part in (*self._idle, *self.shards):
            part.close()


class _Servers(NamedTuple):
    """What the servers told of their tables of one name, with samples or when they were asked.

    Attributes:
      numbers: what `Table.weight` was, float64 `[servers, 3]`.
      draws: number of draws since each server told it.
      weights: the sum of each server's weights; the sizes if all weights are 0. A server without weight gives
        no samples.
      share: the part of each server in their sum.
      allowed: number of samples that each server's limiter allows.
      least: the least of `allowed` of a server with weight.
    """

    numbers: np.ndarray
    draws: np.ndarray
    weights: np.ndarray
    share: np.ndarray
    allowed: np.ndarray
    least: int

    @classmethod
    def of(cls, numbers: np.ndarray, draws: np.ndarray) -> _Servers | None:
        """Returns the state of the tables; None if all are empty."""
        weights, sizes, allowed = numbers.T
        if not sizes.any():
            return None
        weights = weights if weights.any() else sizes
        allowed = np.where(weights > 0, allowed, 0).astype(np.int64)
        return cls(numbers, draws, weights, weights / weights.sum(), allowed, int(allowed[weights > 0].min()))


class ShardedSource(JoinedSource):
    """Draws batches from all servers; see `contracts.Source`.

    Attributes:
      look_s: seconds of a wait for one server, before the others are asked again.
      recall_draws: number of draws after which a server that none of them needed is asked for its numbers.
    """

    look_s = 0.05
    recall_draws = 32

    def __init__(self, client: ShardedClient, seed: int | None) -> None:
        self._client = client
        sources = [each.source() for each in client.shards]
        self._sources: list[Any] = [
            AheadSource(each) if isinstance(each, ServedSource) else each for each in sources
        ]
        self._served = all(isinstance(each, AheadSource) for each in self._sources)
        self._rng = np.random.default_rng(seed)
        # The tables whose samplers are known to be the same on all servers, and whether samples may be kept:
        # not if items leave after some samples, because those that are kept would be missing in the weights.
        self._checked: dict[str, bool] = {}
        self._told: dict[str, _Servers | None] = {}  # by table

    def draw(self, table: str, n: int, timeout: float | None, out: Out, pad: bool) -> Drawn:
        """Draws samples of all servers, in their order."""
        deadline = np.inf if timeout is None else time.monotonic() + timeout
        parts = [(source, table) for source in self._sources]
        ahead = self.spare is not None and self._served and not pad and self._checked.get(table, False)
        servers = self._told.get(table) if ahead else None
        if servers is not None and (servers.least < n or servers.draws.max() >= self.recall_draws):
            servers = None  # A limiter is near, or what they told is old.
        while True:
            servers = servers or self._wait(table, deadline)
            counts, share = self._choose(n, servers, ahead)
            if self._served:
                self._allot((self.spare if self.keeps else 0) if ahead else None, servers, counts.tolist())
            try:
                left = max(0.0, min(self.look_s, deadline - time.monotonic()))
                sample, drawn = self.draw_parts(parts, counts, SHARD_SHIFT, left, out, pad)
                break
            except DeadlineExceededError:
                if time.monotonic() >= deadline:
                    raise
                servers = None  # Other servers may have more by now.
            except ValueError:
                # A message for several batches has items of several lengths, of which one batch may have one.
                if not ahead:
                    raise
                ahead = self.keeps = self._checked[table] = False
        size = servers.numbers[:, 1].sum()
        if ahead:
            self._note(table, servers)
            # Once and for all: the caller then fetches fewer whole batches ahead.
            num_bytes = 0 if self.keeps else sum([x.nbytes for x in nests.flatten(sample.data)[0]])
            self.keeps = num_bytes <= _KEPT_BYTES
        # Both are of the table of all servers together: importance weights multiply them.
        probability = sample.info.probability * share.repeat(counts)
        sizes = np.full_like(sample.info.table_size, size)
        info = sample.info._replace(probability=probability, table_size=sizes)
        return sample._replace(info=info), drawn

    def can_sample(self, table: str, n: int) -> bool:
        servers = self._ask(table)
        return servers is not None and bool(servers.allowed.sum() >= n)

    def give_stock_back(self) -> None:
        """Gives back the samples that are kept; the next draw keeps none unless the caller sets `spare`."""
        self.spare = None
        self._told.clear()
        for source in self._sources if self._served else ():
            source.give_stock_back()

    def interrupt(self) -> None:
        for source in self._sources:
            source.interrupt()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _choose(self, n: int, servers: _Servers, ahead: bool) -> tuple[np.ndarray, np.ndarray]:
        """Divides `n` samples among the servers: numbers, and factors of the samples' probabilities."""
        weights, share, allowed = servers.weights, servers.share, servers.allowed
        counts = self._rng.multinomial(n, share)
        if servers.least >= n:
            return counts, share
        if ahead:
            allowed = allowed + np.where(weights > 0, [source.stock for source in self._sources], 0)
        if (counts <= allowed).all() or allowed.sum() < n:
            return counts, share
        while (counts > allowed).any():
            left = n - np.minimum(counts, allowed).sum()
            counts = np.minimum(counts, allowed)
            others = np.where(counts < allowed, weights, 0)
            counts = counts + self._rng.multinomial(left, others / others.sum())
        return counts, counts / n

    def _ask(self, table: str) -> _Servers | None:
        """Asks the servers for the state of their tables; None if all are empty."""
        if table not in self._checked:
            infos = [shard.server_info()[table] for shard in self._client.shards]
            found = {repr(sorted(info.sampler_options.items())) for info in infos}
            if len(found) > 1:
                raise ValueError(
                    f"table {table!r}: got the samplers {sorted(found)}, expected the same on all servers."
                )
            self._checked[table] = not any(info.max_times_sampled > 0 for info in infos)
        answers = [source.weight(table) for source in self._sources]
        numbers = np.array([answer() for answer in answers], np.float64)
        return _Servers.of(numbers, np.zeros(len(numbers), np.int64))

    def _note(self, table: str, servers: _Servers) -> None:
        """Notes what the servers told with the samples of a batch."""
        numbers, draws = servers.numbers.copy(), servers.draws + 1
        told = [number for number, source in enumerate(self._sources) if source.told is not None]
        for number in told:
            source = self._sources[number]
            numbers[number], draws[number], source.told = source.told, 0, None
        self._told[table] = _Servers.of(numbers, draws) if told else servers._replace(draws=draws)

    def _allot(self, spare: int | None, servers: _Servers, counts: list[int]) -> None:
        """Divides the rest of `spare` among the servers that a batch needs samples of."""
        lacks = [count > source.stock for source, count in zip(self._sources, counts, strict=True)]
        if spare is None or not any(lacks):
            for source in self._sources:
                source.spare = spare
            return
        allowed, share = servers.allowed.tolist(), servers.share
        left = spare - sum(
            [max(0, source.stock - count) for source, count in zip(self._sources, counts, strict=True)]
        )
        for at in [at for at, lack in enumerate(lacks) if lack]:
            # By simulation, messages are fewest if a server gets half as much again as its part of `spare`.
            more = int(max(0, min(left, 1.5 * share[at] * spare, allowed[at] / _LIMITER_PARTS)))
            self._sources[at].spare = more
            left -= more

    def _wait(self, table: str, deadline: float) -> _Servers:
        """Waits until a server has items; returns `_ask`."""
        for source in itertools.cycle(self._sources):
            servers = self._ask(table)
            if servers is not None:
                return servers
            try:
                left = max(0.0, deadline - time.monotonic())
                source.give_back(source.draw(table, 1, min(self.look_s, left), None, True)[1])
            except DeadlineExceededError:
                if time.monotonic() >= deadline:
                    raise
        raise AssertionError("there is at least one server")


def _add(infos: Sequence[TableInfo]) -> TableInfo:
    limiters = [info.rate_limiter_info for info in infos]
    inserts = zip(*[limiter.insert_stats for limiter in limiters], strict=True)
    samples = zip(*[limiter.sample_stats for limiter in limiters], strict=True)
    return infos[0]._replace(
        rate_limiter_info=limiters[0]._replace(
            insert_stats=CallStats(*map(sum, inserts)), sample_stats=CallStats(*map(sum, samples))
        ),
        max_priority=max(info.max_priority for info in infos),
        why_not_sample="" if any(not info.why_not_sample for info in infos) else infos[0].why_not_sample,
        why_not_insert=next((info.why_not_insert for info in infos if info.why_not_insert), ""),
        **{name: sum(getattr(info, name) for info in infos) for name in _SUMMED},
    )
