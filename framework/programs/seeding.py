"""Seeds of the parts of a program, derived from the program's seed, and the setup of a node's process."""

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
    """A seed for `part`, such as `"actor-3"`: independent of other parts, and equal on every engine."""
    return int(np.random.SeedSequence([seed, zlib.crc32(part.encode())]).generate_state(1)[0])


def keep_freed_memory() -> None:
    """Keeps freed blocks of memory of up to 32 MB in this process, instead of returning them to the system.

    A learner on the CPU allocates the same large arrays at each step. By default each is mapped again, and
    clearing its pages took a fifth of a step with images. Only for glibc; has no effect elsewhere.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # Another C library.
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # The largest value that it accepts.
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 64 << 20)


def prepare_process(seed: int) -> None:
    """Seeds Python, NumPy and torch, and sets torch to one thread, or to `OMP_NUM_THREADS` if it is set.

    More threads make small networks slower, and processes that share cores much slower. The engine sets the
    variable for a group with more threads. With several nodes in one process, the last call determines the
    result.
    """
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
