"""Folders of this user alone: for sockets, and in shared memory.

Each holds a file `owner` that its processes keep locked (`flock`), so that the kernel releases the lock with
the last of them, however they end. What a killed process has left is then known by its free lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile

from launch import platforms

_OWNER = "owner"  # the file in a directory that its processes keep locked
# Longest path of a unix socket that the kernel accepts (108 bytes with the terminating zero).
MAX_IPC_PATH = 107


def private_parents() -> list[str]:
    """Returns the folders in which `make_private_directory` may create a directory, best first."""
    parents = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    return list(dict.fromkeys(parent for parent in parents if parent))


def make_private_directory(prefix: str = "lp-") -> str:
    """Creates a directory of mode 0700 for `ipc://` sockets."""
    for parent in private_parents():
        # Room for "/" + the prefix + "xxxxxxxx" + "/" + a file name of 45 characters.
        if len(parent) + len(prefix) <= MAX_IPC_PATH - 55 and os.access(parent, os.W_OK | os.X_OK):
            return tempfile.mkdtemp(prefix=prefix, dir=parent)  # mkdtemp creates it with mode 0700
    raise ValueError(f"TMPDIR: got {private_parents()}, expected a short, writable path. Set TMPDIR to one.")


def share_directory(path: str) -> int:
    """Makes a directory of mode 0700, if there is none, and returns a descriptor that locks it.

    Processes of one machine can share it. The kernel closes their descriptors, and copies of them in forked
    processes, however they end. After that, `remove_abandoned_directories` removes it.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with contextlib.suppress(FileNotFoundError):  # it was removed before it was locked
            check_private(path)
            owner = os.open(os.path.join(path, _OWNER), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(owner, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(os.path.join(path, _OWNER)).st_ino == os.fstat(owner).st_ino:
                    return owner
            os.close(owner)


def check_private(path: str) -> None:
    """Raises `PermissionError` unless `path` is a directory of this user alone, and no link."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{path}: got mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}, expected a "
            f"directory of mode 0700 and owner {os.getuid()}. Remove it, or use make_private_directory()."
        )


def remove_abandoned_directories(parent: str, prefix: str) -> list[str]:
    """Removes this user's directories of a prefix whose lock is free; returns their paths."""
    removed = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):  # another user's, in use, being removed, or of something else
                owner = os.open(os.path.join(entry.path, _OWNER), os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(owner).st_uid == os.getuid():
                        shutil.rmtree(entry.path, ignore_errors=True)
                        removed.append(entry.path)
                finally:
                    os.close(owner)
    return removed


def sweep() -> None:
    """Removes the folders of this user's runs that have no live process."""
    for parent in {platforms.shared_memory_root(), *private_parents()}:
        remove_abandoned_directories(parent, "lp-")
