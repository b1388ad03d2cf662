"""Reverb's `StructuredWriter`: steps in, and items come out where patterns say so.

::

    step = structured.create_reference_step({"observation": None, "reward": None})
    pattern = {"o": step["observation"][-3:], "r": step["reward"][-1]}
    config = structured.create_config(
        pattern, "replay", conditions=[structured.Condition.step_index() % 2 == 0]
    )
    writer = client.structured_writer([config])
"""

from __future__ import annotations

import types
from collections.abc import Sequence

import numpy as np

from framework import nest as nests
from framework.replay.reverb_api.columns import ColumnHistory
from framework.replay.reverb_api.patterns import (
    Condition,
    Config,
    Moment,
    Pattern,
    constant_priority_fn,
    create_config,
    create_reference_step,
    infer_signature,
    pattern_from_transform,
    td_error,
    unpack_pattern,
)
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter, WriterMaker
from framework.types import Nest

__all__ = [
    "Condition",
    "Config",
    "Pattern",
    "StructuredWriter",
    "constant_priority_fn",
    "create_config",
    "create_reference_step",
    "infer_signature",
    "pattern_from_transform",
    "td_error",
    "unpack_pattern",
]


class StructuredWriter:
    """Creates an item after a step for each config whose steps are all there and whose conditions hold.

    Configs with `Condition.is_end_episode()` are looked at in `end_episode` only, the others after complete
    steps only.

    Args:
      client: any client of `framework.replay`.
      configs: from `create_config`.
    """

    def __init__(self, client: WriterMaker, configs: Sequence[Config]):
        if not configs:
            raise ValueError("configs: got none, expected at least one structured.create_config(...)")
        self._configs = list(configs)
        self._flat = [config.flat for config in configs]
        self._packs = [nests.packer(nests.flatten(config.pattern)[1]) for config in configs]
        self._num_leaves = 1 + max(pattern.leaf for flat in self._flat for pattern in flat)
        self._exact = False  # whether `_num_leaves` is that of the first step, rather than the least
        self._writer = TrajectoryWriter(client, max(config.lookback for config in configs))
        self._since_applied = [0] * len(configs)

    @property
    def step_is_open(self) -> bool:
        """Whether the last `append` was a partial step."""
        return self._writer.step_is_open

    def append(self, data: Nest, *, partial_step: bool = False) -> None:
        """Appends a step, or a part of it; None at a leaf means that the step has no data there.

        Raises:
          ValueError: the step has another number of leaves, dtype or shape than before, or fewer leaves than
            a pattern refers to.
        """
        leaves, structure = nests.flatten(data)
        if len(leaves) < self._num_leaves or (self._exact and len(leaves) > self._num_leaves):
            raise ValueError(
                f"append: got a step with {len(leaves)} leaves {nests.paths(structure)}, expected "
                f"{self._num_leaves}{'' if self._exact else ' or more for the patterns'}"
            )
        self._writer.append(leaves, partial_step=partial_step)
        self._num_leaves, self._exact = len(leaves), True
        if not partial_step:
            self._since_applied = [since + 1 for since in self._since_applied]
            self._apply(at_end=False)

    def _apply(self, at_end: bool) -> None:
        columns: list[ColumnHistory] = self._writer.history
        length = len(columns[0])

        def read(leaf: int, steps: int) -> np.ndarray:
            return columns[leaf][-steps:].numpy()

        def last(leaf: int) -> np.ndarray | None:
            return read(leaf, 1)[0] if columns[leaf].has(length - 1) else None

        for number, (config, flat) in enumerate(zip(self._configs, self._flat, strict=True)):
            moment = Moment(self._writer.episode_steps - 1, self._since_applied[number], at_end, last)
            if (
                config.at_end is at_end
                and length >= config.lookback
                and all(condition.test(moment) for condition in config.conditions)
                and all(columns[p.leaf].has(length + at) for p in flat for at in p.steps)
            ):
                parts = [columns[p.leaf][p.steps[0] if p.squeeze else p.steps] for p in flat]
                item = self._packs[number](parts)
                self._writer.create_item(config.table, config.priority(read, config.lookback), item)
                self._since_applied[number] = 0

    def flush(
        self, block_until_num_items: int = 0, timeout_ms: int | None = None, timeout: float | None = None
    ) -> None:
        """See `TrajectoryWriter.flush`."""
        self._writer.flush(block_until_num_items, timeout_ms, timeout)

    def end_episode(
        self, clear_buffers: bool = True, timeout_ms: int | None = None, timeout: float | None = None
    ) -> None:
        """Applies the configs for the end of an episode, flushes, and begins a new episode."""
        try:
            if self._writer.episode_steps:
                self._apply(at_end=True)
        finally:
            self._writer.end_episode(clear_buffers, timeout_ms, timeout)

    def close(self, timeout: float | None = None) -> int:
        """See `TrajectoryWriter.close`."""
        return self._writer.close(timeout)

    def __enter__(self) -> StructuredWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._writer.__exit__(kind, error, traceback)
