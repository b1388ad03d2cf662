"""What the operating system and the processor offer; the one module that asks.

Tests of other platforms switch abilities off. Processes that a program starts inherit both variables:

```sh
REPERTORY_PLATFORM_WITHOUT=shm,fork,prctl    # names of ABILITIES
REPERTORY_PLATFORM_MACHINE=arm64             # instead of platform.machine()
```
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

from launch.errors import LaunchError
from launch.texts import check_known

_SHM = "/dev/shm"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PIECE = b"\0" * (1 << 20)
_PR_SET_PDEATHSIG = 1
_KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2  # of fallocate(2)
OF_ALL_PROCESSES = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

#: By name, whether this system has it.
ABILITIES: dict[str, Callable[[], bool]] = {
    "shm": lambda: os.path.isdir(_SHM),  # a folder in memory
    # On macOS a process that has loaded frameworks must not fork without exec.
    "fork": lambda: sys.platform != "darwin",
    "prctl": lambda: sys.platform == "linux",  # the kernel ends a process with its parent
    "memfd": lambda: hasattr(os, "memfd_create"),  # files in memory that have no name
    "fallocate": lambda: hasattr(os, "posix_fallocate"),  # a file gets its pages before they are written
    "mallopt": lambda: sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"),  # glibc
    "on_exit": lambda: hasattr(ctypes.CDLL(None), "on_exit"),  # glibc: what an exit does first
    "affinity": lambda: hasattr(os, "sched_getaffinity"),  # a process may be bound to some cores
    "boot_id": lambda: os.path.exists(_BOOT_ID),  # a name of the machine since its start
}


def has(ability: str) -> bool:
    """Returns whether this platform has one of `ABILITIES`, and it is not switched off."""
    without = set(filter(None, os.environ.get("REPERTORY_PLATFORM_WITHOUT", "").split(",")))
    check_known("REPERTORY_PLATFORM_WITHOUT", without, sorted(ABILITIES))
    return ability not in without and ABILITIES[ability]()


def is_single_threaded() -> bool:
    """Returns whether this process has no thread but this one, as far as the system tells."""
    threads = "/proc/self/task"
    return not os.path.isdir(threads) or len(os.listdir(threads)) == 1


def machine() -> str:
    """Returns the name of the processor's architecture, such as `x86_64` or `arm64`."""
    return os.environ.get("REPERTORY_PLATFORM_MACHINE") or platform.machine()


def has_ordered_stores() -> bool:
    """Returns whether another processor sees stores in their order and makes its loads in theirs."""
    return machine() in ("x86_64", "AMD64")


def shared_memory_root() -> str:
    """Returns the folder for files that processes map: in memory, or the folder of temporary files."""
    return _SHM if has("shm") else tempfile.gettempdir()


def reserve(descriptor: int, begin: int, end: int) -> None:
    """Gives the new bytes `[begin, end)` of a file their pages; `OSError` if there is no room.

    A write to a mapped page for which there is no room would kill the process. Without `fallocate`, only
    writing zeros shows whether there is.
    """
    if begin < end and has("fallocate"):
        os.posix_fallocate(descriptor, begin, end - begin)
        return
    while begin < end:
        begin += os.pwrite(descriptor, _PIECE[: end - begin], begin)


def free_pages(descriptor: int, begin: int, end: int) -> None:
    """Takes the pages of the bytes `[begin, end)` of a file back, if the system can; they are zero then.

    Processes that have mapped the file may still touch it.
    """
    if sys.platform == "linux" and has("fallocate"):
        start, length = ctypes.c_int64(begin), ctypes.c_int64(end - begin)
        ctypes.CDLL(None).fallocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, start, length)


def map_file(descriptor: int, size: int) -> Any:
    """Returns the first `size` bytes of a file, mapped to read and write, as a buffer.

    It needs no descriptor, so that the limit of open files does not limit how many files are mapped.
    """
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    numbers = (ctypes.c_int(each) for each in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor))
    address = library.mmap(None, ctypes.c_size_t(size), *numbers, ctypes.c_int64(0))
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_char * size).from_address(address)
    # At the interpreter's exit, threads may still use it.
    weakref.finalize(memory, library.munmap, address, size).atexit = False
    return memory


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if has("affinity") else os.cpu_count() or 1


def end_with_parent(number: int) -> None:
    """Makes the kernel send this process the signal `number` when its parent dies, where it can."""
    if has("prctl"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def open_standard_streams() -> None:
    """Opens the null device in place of closed standard streams.

    Sockets and files would get their numbers, which processes that this one starts take for their streams.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def outlive_signals() -> None:
    """Ignores the signals with which Slurm and systemd end all processes of a job, and unblocks them.

    The launcher stops the program; what ended before could not save its state. A handler, because programs
    that this process starts would inherit SIG_IGN, or the blocked signals.
    """
    for number in OF_ALL_PROCESSES:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_ALL_PROCESSES)


def limit_torch() -> None:
    """Gives torch, if it is loaded, one thread, or `OMP_NUM_THREADS`, which it read when it was loaded.

    With all cores, small networks are several times slower.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))


def boot_id() -> str:
    """Returns the machine's name since its start; empty where it has none."""
    with contextlib.suppress(OSError):  # A container may hide it.
        if has("boot_id"):
            with open(_BOOT_ID) as file:
                return file.read().strip()
    return ""


def interpreter() -> str:
    """Returns the file of this process's Python, for further processes; `LaunchError` if it cannot run."""
    path = sys.executable or ""
    if not (os.path.isfile(path) and os.access(path, os.X_OK)):
        raise LaunchError(
            f"sys.executable: got {path!r}, expected the file of this Python, of which nodes are made. "
            "Restore that file and its mode, or set sys.executable to a Python with the same packages."
        )
    return path
