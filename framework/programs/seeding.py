"""Seeds of the parts of one program, all derived from the program's own."""

from __future__ import annotations

import random
import zlib

import numpy as np


def derive_seed(seed: int, part: str) -> int:
    """A seed for ``part`` (``"actor-3"``, say): far from that of any other part, the same on every engine."""
    return int(np.random.SeedSequence([seed, zlib.crc32(part.encode())]).generate_state(1)[0])


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch in this process. With several nodes in a process the last one wins."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
