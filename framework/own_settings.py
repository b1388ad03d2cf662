"""What this library needs of torch and NumPy while its code runs in the caller's process.

A session, a loaded policy, and the parts of an agent that somebody calls by hand compute with few threads
of torch, in float32, on the CPU, and with gradients, whatever the caller has set. They give the caller's
settings back.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from launch import process_state
from launch.context import find_context
from launch.context import here as nodes
from launch.errors import LaunchError

_CORES = torch.get_num_threads()  # Nothing has set it yet, so it is the number of cores.
_PER_THREAD = 50_000  # Parameters of networks for each torch thread.
_SEEDING = threading.Lock()
_Method = TypeVar("_Method", bound=Callable[..., Any])


def threads_for(num_parameters: int) -> int:
    """Torch threads for networks with `num_parameters` numbers: `OMP_NUM_THREADS`, if it is set.

    More threads make small networks slower, and processes that share cores much slower.
    """
    given = int(os.environ.get("OMP_NUM_THREADS") or 0)
    return given or max(1, min(_CORES, num_parameters // _PER_THREAD))


class _Blocks(threading.local):
    depth = 0  # Number of blocks that this thread is in.
    threads: int | None = None  # The caller's, if the block has others.
    leave: contextlib.ExitStack | None = None  # What gives the caller's other settings back.


class OwnSettings:
    """The settings in a `with` block. Within blocks of one thread, the outermost one decides.

    The nodes of programs prepare all but the number of threads. That stays as it is in the nodes that do not
    run on the caller's thread, unless it is given.

    Args:
      tensors: the parameters of the networks that compute in the block, tensors or arrays.
      threads: number of torch threads. None follows from the size of the networks.
    """

    _here = _Blocks()

    def __init__(self, tensors: Iterable[torch.Tensor | np.ndarray] = (), threads: int | None = None):
        self._given = threads
        self._due = threads_for(sum(int(np.prod(tensor.shape)) for tensor in tensors))

    def __enter__(self) -> None:
        here = self._here
        here.depth += 1
        if here.depth > 1:
            return
        try:
            engine, before = (
                _engine() if nodes.context is None else nodes.context.engine,
                torch.get_num_threads(),
            )
            if self._given:
                threads = self._given
            elif engine is None:
                threads = min(self._due, before)  # The caller may have chosen fewer.
            else:
                threads = self._due if engine == "serial" else before
            if threads != before:
                here.threads = before
                torch.set_num_threads(threads)
            if engine is None and not _are_usual():
                here.leave = stack = contextlib.ExitStack()
                stack.enter_context(process_state.new_thread_settings())
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float32)
        except BaseException:  # It may be an interrupt.
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        here = self._here
        here.depth -= 1
        if here.depth:
            return
        if here.threads is not None:
            torch.set_num_threads(here.threads)
            here.threads = None
        if here.leave is not None:
            stack, here.leave = here.leave, None
            stack.close()


def _are_usual() -> bool:
    """Whether the settings of a new thread are set already, in float32. This takes two microseconds."""
    made = torch.empty(0)
    on_cpu = made.dtype == torch.float32 and made.device.type == "cpu"
    return (
        on_cpu and not made.is_inference() and torch.is_grad_enabled() and np.geterr() == process_state.ERRORS
    )


def in_own_settings(method: _Method) -> _Method:
    """Runs a method in the `OwnSettings` that its object has as `settings`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.settings:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def _engine() -> str | None:
    """The engine whose node this thread is in; None outside of nodes."""
    try:
        node = find_context()
    except LaunchError:  # Several programs run in this process, and the thread is none of theirs.
        return None
    return None if node is None else node.engine


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch for the code that makes initial parameters, while no other thread of this process does.

    With several nodes in one process, the parameters would otherwise depend on the order of their threads.
    After the block, torch's generators continue where they were.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with _SEEDING, torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
