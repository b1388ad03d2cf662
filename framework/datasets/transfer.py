"""Copies of batches to a GPU, and the memory of those that TensorFlow takes."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from framework import nest as nests
from framework.replay.types import ReplaySample, Sample, SampleInfo

_ALIGNMENT = 64  # bytes; `EIGEN_MAX_ALIGN_BYTES` of TensorFlow's wheels


class Transfer(Protocol):
    """Brings the samples of a `Dataset` to their place; see `PinnedTransfer`."""

    def buffers(self, n: int) -> list[np.ndarray] | None: ...

    def send(self, sample: Sample, buffered: bool) -> Any: ...

    def receive(self, moving: Any) -> Sample: ...


class AlignedTransfer:
    """Makes a `Dataset` gather into memory that TensorFlow takes without a copy: at multiples of 64 bytes."""

    def __init__(self) -> None:
        self._info: _AlignedMemory | None = None
        self._data: _AlignedMemory | None = None

    def buffers(self, n: int) -> list[np.ndarray] | None:
        """Returns new arrays to gather the next batch into; None before the first batch."""
        return None if self._data is None else self._data.make()

    def send(self, sample: Sample, buffered: bool) -> Sample:
        """Returns the sample. What is not in `buffers()` is copied."""
        data = sample.data
        if self._info is None or not buffered:
            leaves, structure = nests.flatten(data)
            self._info, self._data = _AlignedMemory(sample.info), _AlignedMemory(leaves)
            data = nests.packer(structure)(self._data.copy(leaves))
        return sample._replace(info=SampleInfo(*self._info.copy(sample.info)), data=data)

    def receive(self, moving: Sample) -> Sample:
        return moving


class _AlignedMemory:
    """Makes arrays like given ones in one piece of memory, because a search for a multiple takes time."""

    def __init__(self, like: Sequence[np.ndarray]) -> None:
        self._forms, self._size = [], _ALIGNMENT
        for array in like:
            self._forms.append((array.shape, array.dtype, self._size - _ALIGNMENT))
            self._size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT

    def make(self) -> list[np.ndarray]:
        memory = np.empty(self._size, np.uint8)
        first = -memory.__array_interface__["data"][0] % _ALIGNMENT
        return [np.ndarray(shape, dtype, memory, first + begin) for shape, dtype, begin in self._forms]

    def copy(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        made = self.make()
        for to, array in zip(made, arrays, strict=True):
            to[...] = array
        return made


class PinnedTransfer:
    """Copies samples to a GPU without waiting for the copy.

    Batches are gathered into pinned buffers and copied on a separate stream, so that the copy overlaps with
    learning:

    ```python
    out = transfer.buffers(n)                 # None at first, when the shapes are not known
    sample = transfer.send(gathered, ...)     # starts the copy (the thread that fetches ahead)
    sample = transfer.receive(sample)         # orders the consumer's stream after it
    ```
    """

    def __init__(self, device: Any) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        # Pinned buffers with the event after which they may be filled again.
        self._free: collections.deque[tuple[list[Any], Any]] = collections.deque()
        self._current: list[Any] | None = None
        self._template: list[Any] = []

    def __reduce__(self) -> Any:
        return PinnedTransfer, (self._device,)  # It holds nothing but memory for reuse between two batches.

    def buffers(self, n: int) -> list[np.ndarray] | None:
        """Returns arrays to gather the next batch into; None before the first batch.

        `n` is its number of items, the same in all calls.
        """
        if not self._template:
            return None
        if len(self._free) > 1 or (self._free and self._free[0][1].query()):
            tensors, event = self._free.popleft()
            event.synchronize()
        else:
            tensors = [
                torch.empty((n, *like.shape[1:]), dtype=like.dtype, pin_memory=True)
                for like in self._template
            ]
        self._current = tensors
        return [tensor.numpy() for tensor in tensors]

    def send(self, sample: Sample, buffered: bool) -> _Moving:
        """Starts the copy of a sample: arrays in `buffers()` if `buffered`, else tensors on the CPU."""
        leaves, structure = nests.flatten(sample.data)
        if buffered and self._current is not None:
            pinned = self._current
        else:
            if isinstance(sample, ReplaySample) and all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                if [leaf.shape[1:] for leaf in leaves] != [leaf.shape[1:] for leaf in self._template]:
                    self._free.clear()  # they are for items of other lengths
                self._template = leaves
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
        return sample._replace(data=nests.packer(structure)(moved)), moved, event, pinned

    def receive(self, moving: _Moving) -> Sample:
        """Returns the sample; what the caller's stream does next waits for the copy."""
        sample, tensors, event, _ = moving
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)
        return sample


# A sample that is being copied, its tensors on the device, the event of the copy, and the copied memory.
_Moving = tuple[Sample, list[Any], Any, list[Any]]
