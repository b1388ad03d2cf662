"""A source whose messages bring samples for several draws."""

from __future__ import annotations

import collections
from typing import Any

from framework.replay.base import BaseSource
from framework.replay.batches import Piece, join
from framework.replay.remote.client import ServedSource
from framework.replay.types import Drawn, Out, SampleInfo


class _Block:
    """The samples of one answer, which are handed out in order.

    Attributes:
      samples: all of them; None if they were handed out at once and are not kept.
      size: number of samples.
      drawn: the argument of the source's `release`.
      begin: number of samples that were handed out.
    """

    def __init__(self, samples: Piece | None, size: int, drawn: Any) -> None:
        self.samples, self.size, self.drawn = samples, size, drawn
        self.begin = 0


# The parts of a draw: a block, and where they begin and end in it.
_Taken = list[tuple[_Block, int, int]]


class AheadSource(BaseSource):
    """Draws from one server, and keeps up to `spare` samples for later draws; see `contracts.Source`.

    What is kept was copied when it arrived, so that the end of the session does not change it.

    Attributes:
      stock: number of samples that are kept.
      told: what `Table.weight` was after the last draw; None if that needed no message. The caller resets it.
    """

    def __init__(self, source: ServedSource) -> None:
        self.stock = 0
        self.told: tuple[float, int, int] | None = None
        self._source = source
        self._table = ""
        self._blocks: collections.deque[_Block] = collections.deque()  # with samples that are left

    def ask(self, table: str, n: int, timeout: float | None, pad: bool, least: int | None = None) -> Any:
        if self.spare is None or pad:
            return n, False, self._source.ask(table, n, timeout, pad)
        if table != self._table:
            self.give_stock_back()
            self._table = table
        missing = max(0, n - self.stock)
        sent = self._source.ask(table, missing + self.spare, timeout, pad, missing) if missing else None
        return n, self.stock + self.spare > 0, sent

    def answer(self, asked: Any, out: Out) -> tuple[list[Any], _Taken]:
        n, keeps, sent = asked
        self.told = None
        if sent is not None:
            (sample,), drawn = self._source.answer(sent, None if keeps else out)
            self.told = self._source.told
            if not keeps:
                return [sample], [(_Block(None, n, drawn), 0, n)]
            size = len(sample.info.key)
            self._blocks.append(_Block(Piece.of(sample), size, drawn))
            self.stock += size
        kept: Any = [block.samples for block in self._blocks]
        # None of them is taken yet. An item of one row would otherwise fill several rows of `out`.
        for array, *leaves in zip(
            out or (), *[each[len(SampleInfo._fields) :] for each in kept], strict=False
        ):
            if any(leaf.shape[1:] != array.shape[1:] for leaf in leaves):
                raise ValueError(f"out: got shape {array.shape}, expected [n, {leaves[0].shape[1:]}].")
        self.stock -= n
        pieces: list[Any] = []
        taken: _Taken = []
        done = 0
        while done < n:
            block = self._blocks[0]
            begin = block.begin
            block.begin = end = min(begin + n - done, block.size)
            if end == block.size:
                self._blocks.popleft()
            piece = block.samples.part(begin, end)  # type: ignore[union-attr]  # It is a block that is kept.
            pieces.append(piece)
            taken.append((block, begin, end))
            for array, leaf in zip(out or (), piece[len(SampleInfo._fields) :], strict=False):
                array[done : done + end - begin] = leaf
            done += end - begin
        return pieces, taken

    def draw(self, table: str, n: int, timeout: float | None, out: Out, pad: bool) -> Drawn:
        samples, taken = self.answer(self.ask(table, n, timeout, pad), out)
        return join(samples, out), taken

    def drop(self, asked: Any) -> None:
        if asked[-1] is not None:
            self._source.drop(asked[-1])

    def release(self, drawn: _Taken) -> None:
        for block, _, end in drawn:
            if end == block.size:
                self._source.release(block.drawn)

    def give_back(self, drawn: _Taken) -> None:
        """See `contracts.Source`: what comes from the stock goes back there."""
        for block, begin, end in reversed(drawn):
            if block.samples is None:
                self._source.give_back(block.drawn)
                continue
            self.stock += end - begin
            if block.begin == block.size:
                self._blocks.appendleft(block)
            block.begin = begin

    def weight(self, table: str) -> Any:
        return self._source.weight(table)

    def interrupt(self) -> None:
        self._source.interrupt()

    def close(self) -> None:
        self.give_stock_back()
        self._source.close()

    def give_stock_back(self) -> None:
        """Gives back the samples that are kept."""
        self.stock = 0
        while self._blocks:
            block = self._blocks.popleft()
            self._source.give_back(block.drawn, block.begin)
