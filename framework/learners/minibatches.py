"""A learner that makes several passes over each batch in minibatches, for on-policy agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import tree
from torch import nn

from framework import nest as nests
from framework.config_checks import whole_number
from framework.learners.context import LossContext, LossFn, LossOutput
from framework.learners.gradient import CompiledGradient
from framework.learners.sgd import SGDLearner
from framework.replay.types import ReplaySample
from framework.types import Nest


class Prepared(NamedTuple):
    """A batch prepared for its epochs.

    Attributes:
      data: nest of tensors `[M, ...]`, to shuffle and divide along M: rows, or envs of a recurrent agent.
      rows: number of rows that count; less than M times T where some are masked.
      metrics: metrics that are known before the first minibatch.
    """

    data: Nest
    rows: int
    metrics: dict[str, torch.Tensor]


PrepareFn = Callable[[Any, ReplaySample, LossContext], Prepared]
FinishFn = Callable[[Any, ReplaySample, Prepared, LossContext], dict[str, torch.Tensor]]


class MinibatchLearner(SGDLearner):
    """One step is `epochs` passes over one batch, in shuffled minibatches whose sizes differ by at most one:

    ```text
    prepared = prepare_fn(networks, batch, context)         # advantages, once; no gradient
    for each epoch, for each minibatch:
        loss_fn(networks, minibatch, context)               # one optimizer step
    metrics = finish_fn(networks, batch, prepared, context) # statistics, coefficients; no gradient
    ```

    Every row is used once per epoch. A learner step is one batch. It returns no priorities. Its metrics are
    the three functions', `rows`, `learning_rate`, and `loss` and `gradient_norm` (before clipping) of the
    last minibatch. Metrics of the loss function are means over the last epoch, the only epoch with
    `context.wants_metrics`.

    Args:
      networks: as in `SGDLearner`.
      prepare_fn: a `ReplaySample` of tensors on the device to `Prepared`.
      loss_fn: as in `SGDLearner`, of one minibatch of `Prepared.data`.
      optimizer_fn: as in `SGDLearner`.
      epochs: passes over a batch.
      minibatch_size: rows of a minibatch. The batch is divided into minibatches of the nearest possible size.
        None makes one minibatch of the whole batch, in its order. Several learners use the same order and the
        same minibatches as one learner would; each computes the rows that are in its shard. If a minibatch
        has no rows in the shard, the loss must be finite and its weight 0.
      finish_fn: called after the last epoch. Its result is added to the metrics. None adds nothing.
      options: others of `SGDLearner`.
    """

    fixed_sizes = False

    def __init__(
        self,
        networks: nn.Module,
        prepare_fn: PrepareFn,
        loss_fn: LossFn,
        optimizer_fn: Callable[[Any], torch.optim.Optimizer],
        *,
        epochs: int,
        minibatch_size: int | None,
        finish_fn: FinishFn | None = None,
        **options: Any,
    ):
        self._prepare_fn, self._finish_fn = prepare_fn, finish_fn
        self._epochs = whole_number("epochs", epochs, 1)
        self._minibatch_size = minibatch_size
        if minibatch_size is not None:
            whole_number("minibatch_size", minibatch_size, 1)
        super().__init__(networks, loss_fn, optimizer_fn, **options)

    def _minimize(self, batch: ReplaySample, context: LossContext) -> tuple[LossOutput, torch.Tensor]:
        """All epochs over `batch`. Metrics come from the three functions, and `rows`; no priorities."""
        with torch.no_grad():
            prepared = self._prepare_fn(self.networks, batch, context)
        rows, count, before = prepared.rows, len(tree.flatten(prepared.data)[0]), 0
        if self._group is not None:
            counts = self._group.counts(rows, count)
            rows, count = (sum(column) for column in zip(*counts, strict=True))
            before = sum(others for _, others in counts[: self._group.rank])
        parts = 1 if self._minibatch_size is None else round(rows / self._minibatch_size)
        parts = max(1, min(parts, count))
        for epoch in range(self._epochs):
            in_epoch = context._replace(wants_metrics=epoch == self._epochs - 1)
            each: list[LossOutput] = []
            telling: list[LossOutput] = []  # the outputs of minibatches in which this learner has rows
            for size, minibatch in self._shuffled(prepared.data, parts, count, before):
                output, norm = super()._minimize(minibatch, in_epoch)
                each.append(output)
                if size:
                    telling.append(output)
        metrics = dict(prepared.metrics)
        for name in each[0].metrics:
            metrics[name] = torch.stack([output.metrics[name] for output in telling or each]).mean()
        if self._finish_fn is not None:
            with torch.no_grad():
                metrics.update(self._finish_fn(self.networks, batch, prepared, context))
        metrics["rows"] = torch.tensor(rows)
        return LossOutput(each[-1].loss, metrics), norm

    def _shuffled(self, data: Nest, parts: int, count: int, before: int) -> Any:
        """Sizes and minibatches: `count` elements in random order, in `parts` whose sizes differ by at most
        one.

        `data` holds the elements from index `before` on; with one learner, all of them.
        """
        leaves = tree.flatten(data)
        if self._minibatch_size is None:
            return [(len(leaves[0]), data)]
        order = torch.randperm(count, generator=self._generator, device=self.device)
        size, larger = divmod(count, parts)
        cuts = [size + 1] * larger + [size] * (parts - larger)
        if len(leaves[0]) < count:
            mine = (order >= before) & (order < before + len(leaves[0]))
            cuts = torch.stack([part.sum() for part in mine.split(cuts)]).tolist()
            order = order[mine] - before
        build = nests.unflattener(data)
        # Shuffled once per epoch: each minibatch is then a slice and needs no copy.
        pieces: list[Sequence[torch.Tensor]] = [leaf[order].split(cuts) for leaf in leaves]
        if isinstance(self._gradient, CompiledGradient):  # It takes no slices: see `fixed_sizes`.
            pieces = [[piece.clone() for piece in each] for each in pieces]
        return ((size, build(list(piece))) for size, *piece in zip(cuts, *pieces, strict=True))
