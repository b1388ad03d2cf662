"""The folders of a run, which are removed at its end.

A run has a folder for sockets and one in shared memory. Each holds a file `owner` that the launcher and all
processes of the run keep locked (`flock`), so that the kernel releases the lock with the last of them,
however they end. A run removes its folders itself. The same user's next run removes the folders of a run that
was killed as a whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from launch import platforms
from launch.context import shared_memory_path
from launch.rpc import sockets


class Folders:
    """The folders of one run.

    Attributes:
      sockets: for `ipc://` sockets.
      paths: all of them.
      locks: descriptors that hold the locks; the fork server inherits them.
    """

    def __init__(self, job: str) -> None:
        sweep()
        self.sockets = sockets.make_private_directory(f"lp-{job}-")
        self.paths = [self.sockets]
        self.locks: list[int] = []
        try:
            self.paths.append(shared_memory_path(job))
            for path in self.paths:
                self.locks.append(sockets.share_directory(path))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Removes the folders and their contents."""
        remove(self.paths)
        for lock in self.locks:
            os.close(lock)
        self.locks = []


def remove(paths: Sequence[str]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def sweep() -> None:
    """Removes the folders of this user's runs that have no live process."""
    for parent in {platforms.shared_memory_root(), *sockets.private_parents()}:
        sockets.remove_abandoned_directories(parent, "lp-")
