"""From numpy arrays to tensors on a device, without waiting for the copy."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.types import PaddedSample, ReplaySample


class Transfer:
    """Turns samples of numpy arrays into samples of tensors; ``info`` stays numpy.

    On a CPU tensors share memory with the arrays. To a GPU, batches are gathered straight into pinned
    buffers and copied on a stream of their own, so that the copy overlaps with learning::

        out = transfer.buffers()                  # None at first: the shapes are not known yet
        sample = transfer.send(gathered, ...)     # starts the copy (the thread that fetches ahead)
        sample = transfer.receive(sample)         # orders the consumer's stream after it

    Arrays that torch has no dtype for (strings) stay numpy arrays.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None
        # Pinned buffers with the event after which they may be filled again.
        self._free: collections.deque[tuple[list[Any], Any]] = collections.deque()
        self._current: list[Any] | None = None
        self._template: list[Any] = []

    def buffers(self) -> list[np.ndarray] | None:
        """Arrays to gather the next batch into, or None if new ones are as good."""
        if not self._cuda or not self._template:
            return None
        if len(self._free) > 1 or (self._free and self._free[0][1].query()):
            tensors, event = self._free.popleft()
            event.synchronize()
        else:
            tensors = [torch_empty(self._torch, like) for like in self._template]
        self._current = tensors
        return [tensor.numpy() for tensor in tensors]

    def send(self, sample: Any, buffered: bool) -> Any:
        """Starts the copy of a gathered sample; ``buffered`` if it lies in `buffers`."""
        leaves, structure = nests.flatten(sample.data)
        pack = nests.packer(structure)
        torch = self._torch
        if not self._cuda:
            tensors = [self._tensor(leaf).to(self._device) if _fits(leaf) else leaf for leaf in leaves]
            return _with_data(sample, pack(tensors))
        if not self._template and isinstance(sample, ReplaySample) and all(map(_fits, leaves)):
            self._template = [self._tensor(leaf) for leaf in leaves]
        pinned: list[Any]
        if buffered and self._current is not None:
            pinned = self._current
        else:
            pinned = [self._tensor(leaf).pin_memory() if _fits(leaf) else leaf for leaf in leaves]
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
        return _Moving(_with_data(sample, pack(moved)), moved, event, pinned)

    def receive(self, sample: Any) -> Any:
        """The sample of tensors; what the caller does next on its stream waits for the copy."""
        if not isinstance(sample, _Moving):
            return sample
        stream = self._torch.cuda.current_stream(self._device)
        stream.wait_event(sample.event)
        for tensor in sample.tensors:
            if isinstance(tensor, self._torch.Tensor):
                tensor.record_stream(stream)
        return sample.sample

    def _tensor(self, array: np.ndarray) -> Any:
        return self._torch.from_numpy(array if array.flags.writeable else array.copy())


class _Moving:
    """A sample on its way to the device; keeps the pinned memory alive until it is there."""

    def __init__(self, sample: Any, tensors: list[Any], event: Any, pinned: list[Any]) -> None:
        self.sample = sample
        self.tensors = tensors
        self.event = event
        self.pinned = pinned


def torch_empty(torch: Any, like: Any) -> Any:
    """A pinned tensor with the shape and dtype of another."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _fits(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind in "biufc"


def _with_data(sample: Any, data: Any) -> Any:
    return (
        PaddedSample(sample.info, data, sample.lengths)
        if isinstance(sample, PaddedSample)
        else ReplaySample(sample.info, data)
    )
