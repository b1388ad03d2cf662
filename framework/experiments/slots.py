"""Slots: equal parts of a machine, in each of which one run at a time runs (rlpyt's affinities)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from launch import platforms

T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """A part of a machine.

    Attributes:
      cores: numbers of the cores that its run may use; empty where the system binds no process.
      devices: the GPUs that its run sees, as in `CUDA_VISIBLE_DEVICES`.
    """

    cores: tuple[int, ...]
    devices: tuple[str, ...]

    def bind(self) -> None:
        """Binds the calling thread, and what it starts, to the cores."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    def variables(self) -> dict[str, str]:
        """Environment variables of its run.

        A run in a slot of several cores decides on its threads itself, as always: it sees the slot's cores.
        """
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1"} if len(self.cores) < 2 else {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices), **threads}


def make_slots(count: int) -> list[Slot]:
    """Divides the cores and the GPUs that this process may use among `count` slots.

    If there are fewer cores than slots, several slots share one; likewise GPUs.
    """
    cores = sorted(os.sched_getaffinity(0)) if platforms.has("affinity") else []
    return [Slot(*parts) for parts in zip(_shares(cores, count), _shares(_devices(), count), strict=True)]


def _shares(things: Sequence[T], count: int) -> list[tuple[T, ...]]:
    if not things or count > len(things):
        return [tuple(things[i % len(things) : i % len(things) + 1]) if things else () for i in range(count)]
    ends = [i * len(things) // count for i in range(count + 1)]
    return [tuple(things[begin:end]) for begin, end in itertools.pairwise(ends)]


def _devices() -> list[str]:
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [each for each in given.split(",") if each]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]
