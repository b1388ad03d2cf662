"""Seeds of the parts of one program, all derived from the program's own; what a node sets up first."""

from __future__ import annotations

import os
import random
import zlib

import numpy as np


def derive_seed(seed: int, part: str) -> int:
    """A seed for ``part`` (``"actor-3"``, say): far from that of any other part, the same on every engine."""
    return int(np.random.SeedSequence([seed, zlib.crc32(part.encode())]).generate_state(1)[0])


def prepare_process(seed: int) -> None:
    """Seeds Python, NumPy and torch, and gives torch one thread (or ``OMP_NUM_THREADS``, where that is set).

    More threads make small networks slower, and processes that share cores much slower; the engine sets the
    variable for a group that was given more. With several nodes in one process the last one wins.
    """
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
