"""What a loss function gets beside the networks and the batch, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from framework.learners.distributed import LearnerGroup
from framework.losses import importance_weights
from framework.replay.types import SampleInfo


class LossOutput(NamedTuple):
    """The result of a loss function.

    Attributes:
      loss: scalar to minimize.
      metrics: name to scalar tensor, for the logs. They stay on the device until a row is logged.
      priorities: `[N]` new priorities of the items of the batch, or None.
      weight: number of elements of which the loss is the mean, if it may differ between the shards of several
        learners. None if it is equal for all of them.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    priorities: torch.Tensor | None = None
    weight: torch.Tensor | None = None


class Questions(Protocol):
    """Stands in for what a compiled loss cannot compute: numbers of a generator, and choices by the step."""

    def draw(self, method: str, empty: torch.Tensor) -> torch.Tensor:
        """What `empty.METHOD(generator=...)` returns."""
        ...

    def is_due(self, period: int, offset: int) -> bool:
        """What `LossContext.is_due` returns."""
        ...


class LossContext(NamedTuple):
    """Inputs of a loss function in addition to the networks and the batch.

    Counts are 0-d int64 tensors on the CPU: they work in arithmetic with tensors on any device, and reading
    them does not synchronize a device. A compiled loss (`step_mode`) must not read them: it computes with
    them, asks `is_due`, and draws random numbers with the methods below.

    Attributes:
      targets: the target networks, by the name of the child that they follow.
      learner_steps: number of learner steps before this one.
      env_steps: steps of the program's clock so far, for schedules: env steps, or learner steps where nothing
        acts.
      generator: random generator on the learner's device; part of the checkpoint. It is equal in all
        learners, so use `normal_like` and `uniform_like` for numbers that differ between items.
      wants_metrics: whether the metrics of this loss are logged. If not, the loss may omit them.
      group: the group of learners that share the batch; None with one learner.
      asked: answers in place of the generator and the counts while a loss is compiled; otherwise None.
    """

    targets: nn.ModuleDict
    learner_steps: torch.Tensor
    env_steps: torch.Tensor
    generator: torch.Generator
    wants_metrics: bool = True
    group: LearnerGroup | None = None
    asked: Questions | None = None

    @property
    def total(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function that sums a tensor over all learners, which must all call it; None with one learner."""
        return None if self.group is None else self.group.total

    @property
    def largest(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function for the elementwise maximum over all learners, which must all call it; None with one."""
        return None if self.group is None else self.group.largest

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors `[N, ...]` of all learners, one after the other; all must call it, with one shape."""
        if self.group is None:
            return tensor
        whole = tensor.new_zeros(self.group.size, *tensor.shape)
        whole[self.group.rank] = tensor
        return self.group.total(whole).flatten(0, 1)

    def is_due(self, period: int, offset: int = 1) -> bool:
        """Whether this step is the last one of `period` learner steps, as those that move the targets are.

        An `offset` of 0 asks whether the step before this one was.
        """
        if self.asked is not None:
            return self.asked.is_due(period, offset)
        return is_due(int(self.learner_steps), period, offset)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normals of this shape, float32, equal in all learners."""
        return self._draw("normal_", torch.empty(shape, device=self.generator.device))

    def normal_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Standard normals of the shape `[N, ...]`, dtype and device of `tensor`, whose rows are items.

        Each of several learners draws the noise of the whole batch and takes its shard, so that together they
        use the noise of a single learner. Their shards have to be equally large. A
        `MinibatchLearner` divides minibatches into shards of several sizes.
        """
        return self._shard(self._draw("normal_", self._whole_like(tensor)))

    def uniform_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uniform numbers in [0, 1) for items; otherwise like `normal_like`."""
        return self._shard(self._draw("uniform_", self._whole_like(tensor)))

    def _draw(self, method: str, empty: torch.Tensor) -> torch.Tensor:
        if self.asked is not None:
            return self.asked.draw(method, empty)
        drawn: torch.Tensor = getattr(empty, method)(generator=self.generator)
        return drawn

    def _whole_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor for the items of all learners, where `tensor` is for this one's."""
        if self.group is None:
            return torch.empty_like(tensor)
        return tensor.new_empty((self.group.size * len(tensor), *tensor.shape[1:]))

    def _shard(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows of this learner."""
        if self.group is None:
            return whole
        rank, count = self.group.rank, len(whole) // self.group.size
        return whole[rank * count : (rank + 1) * count]

    def importance_weights(self, info: SampleInfo, exponent: torch.Tensor | float) -> torch.Tensor:
        """`losses.importance_weights` of the items of a batch, float32`[N]` on the learner's device."""
        probability, size = (
            each if isinstance(each, torch.Tensor) else torch.as_tensor(each, device=self.generator.device)
            for each in (info.probability, info.table_size)
        )
        return importance_weights(probability, size, exponent, self.largest)


def is_due(steps: int, period: int, offset: int = 1) -> bool:
    """Whether `steps + offset` is a multiple of `period`, and not 0."""
    return steps + offset > 0 and (steps + offset) % period == 0


# Networks, batch, context. The batch is a `ReplaySample`, or a minibatch of one.
LossFn = Callable[[Any, Any, LossContext], LossOutput]
