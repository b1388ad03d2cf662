"""Seeds of the global random generators in the process of a node."""

from __future__ import annotations

import random
import secrets
import sys
import zlib


def seed_generators(seed: int | None) -> None:
    """Seeds the generators of Python, NumPy and torch, if they are imported; None seeds them at random.

    Forks share the state of all three, and torch's begins with the same state in every process.
    """
    seed = secrets.randbits(32) if seed is None else seed % 2**32
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def of_node(seed: int | None, label: str) -> int | None:
    """The seed of a node of a program with `seed`; None without one."""
    return None if seed is None else zlib.crc32(f"{seed} {label}".encode())
