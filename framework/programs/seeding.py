"""Seeds of the parts of one program, all derived from the program's own; what a node sets up first."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import zlib

import numpy as np

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def derive_seed(seed: int, part: str) -> int:
    """A seed for `part` (`"actor-3"`, say): far from that of any other part, the same on every engine."""
    return int(np.random.SeedSequence([seed, zlib.crc32(part.encode())]).generate_state(1)[0])


def keep_freed_memory() -> None:
    """Lets this process keep memory that it freed, up to 32 MB apiece, instead of giving it back.

    A learner on the CPU asks for the same large arrays at each step. By default each is mapped again, and
    clearing its pages took a fifth of a step with images. Only for glibc; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 64 << 20)


def prepare_process(seed: int) -> None:
    """Seeds Python, NumPy and torch, and gives torch one thread (or `OMP_NUM_THREADS`, where that is set).

    More threads make small networks slower, and processes that share cores much slower; the engine sets the
    variable for a group that was given more. With several nodes in one process the last one wins.
    """
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
