"""From numpy arrays to tensors on a device."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import numpy as np
import tree

from framework import nest as nests
from framework.replay.types import PaddedSample, ReplaySample


def is_cuda(device: Any) -> bool:
    """Whether a torch device, or its name, is a GPU of CUDA."""
    import torch

    return torch.device(device).type == "cuda"


def to_tensors(sample: Any, device: Any) -> Any:
    """The sample with tensors on a torch device; on the CPU they share memory with the arrays.

    `info` stays numpy, and so do arrays that torch has no dtype for (strings).
    """
    import torch

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
            return leaf
        return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy()).to(device)

    return sample._replace(data=tree.map_structure(move, sample.data))


class PinnedTransfer:
    """Turns samples of numpy arrays into samples of tensors on a GPU, without waiting for the copy.

    Batches are gathered straight into pinned buffers and copied on a stream of their own, so that the copy
    overlaps with learning:

    ```python
    out = transfer.buffers()                  # None at first: the shapes are not known yet
    sample = transfer.send(gathered, ...)     # starts the copy (the thread that fetches ahead)
    sample = transfer.receive(sample)         # orders the consumer's stream after it
    ```

    The samples are those of `to_tensors`.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        # Pinned buffers with the event after which they may be filled again.
        self._free: collections.deque[tuple[list[Any], Any]] = collections.deque()
        self._current: list[Any] | None = None
        self._template: list[Any] = []

    def buffers(self) -> list[np.ndarray] | None:
        """Arrays to gather the next batch into, or None if new ones are as good."""
        if not self._template:
            return None
        if len(self._free) > 1 or (self._free and self._free[0][1].query()):
            tensors, event = self._free.popleft()
            event.synchronize()
        else:
            tensors = [
                self._torch.empty(like.shape, dtype=like.dtype, pin_memory=True) for like in self._template
            ]
        self._current = tensors
        return [tensor.numpy() for tensor in tensors]

    def send(self, sample: ReplaySample | PaddedSample, buffered: bool) -> _Moving:
        """Starts the copy of a gathered sample; `buffered` if it lies in `buffers`."""
        torch = self._torch
        if buffered and self._current is not None:
            pinned = self._current
            structure = nests.flatten(sample.data)[1]
        else:
            leaves, structure = nests.flatten(to_tensors(sample, "cpu").data)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if not self._template and isinstance(sample, ReplaySample) and len(tensors) == len(leaves):
                self._template = tensors
            pinned = [leaf.pin_memory() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        with torch.cuda.stream(self._stream):
            moved = [
                each.to(self._device, non_blocking=True) if isinstance(each, torch.Tensor) else each
                for each in pinned
            ]
            event = torch.cuda.Event()
            event.record()
        if buffered:
            self._free.append((pinned, event))
            self._current = None
        return _Moving(sample._replace(data=nests.packer(structure)(moved)), moved, event, pinned)

    def receive(self, sample: _Moving) -> ReplaySample | PaddedSample:
        """The sample of tensors; what the caller does next on its stream waits for the copy."""
        stream = self._torch.cuda.current_stream(self._device)
        stream.wait_event(sample.event)
        for tensor in sample.tensors:
            if isinstance(tensor, self._torch.Tensor):
                tensor.record_stream(stream)
        return sample.sample


class _Moving(NamedTuple):
    """A sample on its way to the device; keeps the pinned memory alive until it is there."""

    sample: ReplaySample | PaddedSample
    tensors: list[Any]
    event: Any
    pinned: list[Any]
