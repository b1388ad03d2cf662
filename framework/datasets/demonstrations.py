"""Demonstrations: episodes in a table of their own, of which every batch of an acting agent has a share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from framework import replay
from framework.adders import REPLAY_TABLE, Adder
from framework.datasets.dataset import Dataset
from framework.datasets.episodes import EpisodeDataset, play
from framework.datasets.files import read_episodes
from framework.replay.contracts import ReplayClient
from framework.replay.sharded import MAX_SHARDS
from framework.specs import EnvironmentSpec

DEMONSTRATIONS_TABLE = "demonstrations"


class Demonstrations:
    """Episodes that one learner writes into a table once, and from which nothing is removed.

    Args:
      source: a folder of episodes, or `module:function` that returns them; see `framework.datasets.files`.
      n_step: steps of the adder's transitions.
      make_adder: makes a `NStepTransitionAdder` that writes into `DEMONSTRATIONS_TABLE` of a client.
    """

    def __init__(self, source: str | None, n_step: int, make_adder: Callable[[ReplayClient], Adder]):
        self._source, self._n_step, self._make_adder = source, n_step, make_adder

    def episodes(self) -> EpisodeDataset:
        """The episodes. Raises ValueError without a source."""
        if self._source is None:
            raise ValueError(
                "demonstrations: got None, expected a folder of episodes or module:function. Record episodes "
                "with repertory record, or framework.datasets.record."
            )
        return read_episodes(self._source)

    def make_table(self, spec: EnvironmentSpec, sampler: Any) -> replay.Table:
        """Their table. Raises ValueError unless they fit `spec`."""
        episodes = self.episodes()
        episodes.check(spec)
        # Never full. Each of several servers has a part of this size and any number of the episodes.
        size = MAX_SHARDS * self._num_items(episodes)
        remover, limiter = replay.selectors.Fifo(), replay.rate_limiters.MinSize(1)
        return replay.Table(DEMONSTRATIONS_TABLE, sampler, remover, size, limiter)

    def make_dataset(
        self, client: ReplayClient, fraction: float, batch_size: int, *, writes: bool = True, **options: Any
    ) -> Dataset:
        """Batches of demonstrations and of the actors' items.

        Args:
          client: replay, with both tables.
          fraction: share of demonstrations in a batch.
          batch_size: items of a batch.
          writes: whether to write the demonstrations, if they are not there, also after a restart of the
            server from no checkpoint: True in one learner.
          options: of `Dataset`.
        """
        if writes:
            self._fill(client, client.server_info()[DEMONSTRATIONS_TABLE].current_size)

        def fill_again() -> None:
            if not client.server_info()[DEMONSTRATIONS_TABLE].current_size:
                self._fill(client, 0)

        shares = {DEMONSTRATIONS_TABLE: fraction, REPLAY_TABLE: 1.0 - fraction}
        return Dataset(client, shares, batch_size, while_waiting=fill_again if writes else None, **options)

    def _fill(self, client: ReplayClient, size: int) -> None:
        episodes = self.episodes()
        if size == self._num_items(episodes):
            return
        client.reset(DEMONSTRATIONS_TABLE)
        play(episodes, lambda: self._make_adder(client), client)

    def _num_items(self, episodes: EpisodeDataset) -> int:
        """What `NStepTransitionAdder` makes of them."""
        lengths = episodes.lengths
        return int((lengths + np.minimum(lengths, self._n_step) - 1).sum())
