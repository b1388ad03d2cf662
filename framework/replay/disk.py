"""What files need to outlive a crash of the machine."""

from __future__ import annotations

import os


def sync(path: str | os.PathLike) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
