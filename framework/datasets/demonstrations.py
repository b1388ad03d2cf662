"""Tables of episodes from files: all that a learner learns from, or a share of each of its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from framework import replay
from framework.adders import Adder
from framework.datasets.episodes import EpisodeDataset, plain_spec, play
from framework.datasets.files import read_episodes
from framework.replay.contracts import ReplayClient
from framework.replay.sharded import MAX_SHARDS
from framework.specs import EnvironmentSpec

DEMONSTRATIONS_TABLE = "demonstrations"


def table_of_episodes(name: str, path: str, spec: EnvironmentSpec, sampler: Any) -> replay.Table:
    """A table that holds the items of all episodes at `path`. Raises ValueError unless they fit `spec`."""
    episodes = read_episodes(path)
    episodes.check(spec)
    # No adder makes more items than two for each step. A server may hold any number of the episodes.
    size = MAX_SHARDS * (2 * episodes.num_steps + len(episodes))
    return replay.Table(name, sampler, replay.selectors.Fifo(), size, replay.rate_limiters.MinSize(1))


def fill(
    client: ReplayClient, table: str, path: str, make_adder: Callable[[EnvironmentSpec], Adder]
) -> Callable[[], None]:
    """Writes the episodes at `path` into a table, unless it has them.

    A table from which nothing was drawn may lack some, because its writer was killed, and is written again.

    Args:
      client: replay, with the table.
      table: its name.
      path: see `read_episodes`.
      make_adder: makes an adder that writes into the table.

    Returns:
      A function that fills the table if its server lost all items, also by a restart from no checkpoint.
    """

    def write() -> None:
        episodes: EpisodeDataset = read_episodes(path)
        spec = episodes.spec or plain_spec(episodes[0])
        play(episodes, lambda: make_adder(spec), client)

    def write_if_empty() -> None:
        if not client.server_info()[table].current_size:
            write()

    info = client.server_info()[table]
    if info.current_size and not info.rate_limiter_info.sample_stats.completed:
        client.reset(table)
    write_if_empty()
    return write_if_empty
