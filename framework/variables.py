"""Parameters on their way from a learner to the actors.

A learner's node publishes into one `VariableBlock`. Each actor updates its networks with a `VariableClient`.
A *variable* is a named child of the networks; its value is the child's state dict. The *version* is the
number of learner steps and only grows.

```text
optimizer.step ─▶ block.publish(version, learner.parameters())      one copy into the block
                             │  in shared memory: every process of the machine maps the same block
                             ▼
client.update() ─▶ block.read                                       compares an integer, then one copy
                                                                    of the variables that the policy names
```

Where the block cannot be mapped (on another machine, or on an engine without shared memory), the client calls
`get_variables(names, newer_than)` of the learner's node, or of a variable source, and gets a future.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import launch
from framework import core
from framework.config_checks import whole_number
from framework.parameters import NamedArrays, Parameters, state_of
from framework.replay.shm import attach, back_with_memory
from launch import platforms
from launch.context import find_context

_BEGUN, _DONE, _SLOTS = 0, 1, 2  # Places in the header.
_HEADER_BYTES = _ALIGNMENT = 64


class Variables(NamedTuple):
    """Parameters as they are sent in a message.

    Attributes:
      version: number of learner steps that produced the parameters.
      env_steps: env steps of the program when the parameters were published.
      values: the arrays by variable and entry.
    """

    version: int
    env_steps: int
    values: dict[str, dict[str, np.ndarray]]


class _Entry(NamedTuple):
    """The position of an array in a slot."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


Layout = dict[str, dict[str, _Entry]]


class VariableBlock:
    """The newest parameters of one learner in flat memory, private or shared by the processes of a machine.

    One thread may publish; any number of processes may read.

    ```text
    header   int64    begun · done · version and env steps of slot 0 · version and env steps of slot 1
    slot 0            every array, one after the other
    slot 1            every array, one after the other
    ```

    Publication n writes slot n mod 2, between `begun = n` and `done = n`. A reader copies slot `done` mod 2
    and copies again if publication `done + 2` began in the meantime. Readers therefore never see parts of two
    versions, and the writer never waits for a reader. A writer that dies during a publication leaves the
    other slot intact, and its successor continues in the same file.

    This needs loads and stores that keep their order, as on x86. Other processors (arm64) reorder them, so
    both sides call `flock` on the block's file at each `·`:

    ```text
    publish   begun = n  ·  write the slot  ·  done = n
    read      done  ·  copy the slot  ·  begun
    ```

    For all processes, the kernel changes the locks of a file in one critical section. So any two calls have
    an order, and what precedes the first is visible after the second. A reader that finds `done = n` calls
    `flock` after the writer's second call: it copies all of publication n. A copy with a byte of publication
    n + 2 was made after the writer's first call, so the reader then finds `begun = n + 2`. The locks are
    shared ones: none waits for another. In private memory, the interpreter's lock does the same.

    Args:
      parameters: arrays by variable and entry, as `publish` gets. Only their shapes and dtypes are used.
      path: a file in shared memory, see `shared_path`. An existing file is continued. None: private memory.

    Attributes:
      changed: notified at each publication of this object, not of other processes.

    Raises:
      StoreFullError: Shared memory is full.
    """

    def __init__(self, parameters: Parameters, path: str | None = None):
        layout: Layout = {}
        offset = 0
        for name, state in parameters.items():
            layout[name] = entries = {}
            for key, value in state.items():
                array = np.asarray(value)
                entries[key] = _Entry(offset, array.shape, array.dtype)
                offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if path is not None:
            os.close(os.open(path, os.O_CREAT, 0o600))
            begin, end = os.path.getsize(path), _HEADER_BYTES + 2 * offset
            if begin < end:  # On macOS, this writes zeros.
                back_with_memory(path, begin, end)
        self._attach(layout, offset, path)
        self._header[_BEGUN] = self._header[_DONE]

    def _attach(self, layout: Layout, size: int, path: str | None, memory: np.ndarray | None = None) -> None:
        self._layout, self._size, self._path = layout, size, path
        total = _HEADER_BYTES + 2 * size
        self.changed = threading.Condition()
        self._order: Callable[[], Any] = bool  # Does nothing: the processor keeps the order.
        if path is not None:
            if not platforms.has_ordered_stores():
                file = os.open(path, os.O_RDONLY)
                weakref.finalize(self, os.close, file)
                self._order = functools.partial(fcntl.flock, file, fcntl.LOCK_SH)
            memory = attach(path, (total,), np.uint8)
        elif memory is None:
            memory = np.zeros(total, np.uint8)
        self._memory = memory
        self._header = memory[:_HEADER_BYTES].view(np.int64)
        self._slots = [
            {
                name: {k: np.ndarray(e.shape, e.dtype, memory, begin + e.offset) for k, e in entries.items()}
                for name, entries in layout.items()
            }
            for begin in (_HEADER_BYTES, _HEADER_BYTES + size)
        ]

    @property
    def names(self) -> Sequence[str]:
        """The names of the variables."""
        return tuple(self._layout)

    @property
    def version(self) -> int:
        """The newest version; -1 before the first publication."""
        done = int(self._header[_DONE])
        self._order()
        return int(self._header[_SLOTS + 2 * (done % 2)]) if done else -1

    def publish(self, version: int, parameters: Parameters, env_steps: int = 0) -> None:
        """Copies `parameters` into the block as `version`.

        Args:
          version: number of learner steps, greater than at the publication before.
          parameters: the result of `Learner.parameters()`.
          env_steps: env steps of the program so far.

        Raises:
          ValueError: The version is not greater, or the arrays differ from the constructor's.
        """
        done = int(self._header[_DONE])
        newest = self._header[_SLOTS + 2 * (done % 2)]
        if done and version <= newest:
            raise ValueError(f"version: got {version}, expected more than {newest}. Versions only grow.")
        slot = (done + 1) % 2
        self._header[_BEGUN] = done + 1
        self._order()
        copy_variables(parameters, self._slots[slot])
        self._header[_SLOTS + 2 * slot :][:2] = version, env_steps
        self._order()
        with self.changed:
            self._header[_DONE] = done + 1
            self.changed.notify_all()

    def wait_for(self, version: int, timeout: float) -> bool:
        """Waits at most `timeout` seconds until this object has published `version` or a newer one."""
        with self.changed:
            return self.changed.wait_for(lambda: self.version >= version, timeout)

    def read(self, targets: Parameters, newer_than: int = -1) -> core.Progress | None:
        """Copies the variables that `targets` names into its arrays.

        Returns:
          The version and env steps of the variables. None, without a change to `targets`, if no version is
          newer than `newer_than`.

        Raises:
          KeyError: `targets` names a variable that is not published.
          ValueError: `targets` has other keys or shapes than the published variables.
        """
        while True:
            done = int(self._header[_DONE])
            self._order()
            version, env_steps = self._header[_SLOTS + 2 * (done % 2) :][:2].tolist()
            if done == 0 or version <= newer_than:
                return None
            copy_variables(self._slots[done % 2], targets)
            self._order()
            if self._header[_BEGUN] < done + 2:
                return core.Progress(version, env_steps)

    def get_variables(
        self, names: Sequence[str] = (), newer_than: int = -1, timeout: float = 0.0
    ) -> Variables | None:
        """A copy of the variables `names` (empty: all), or None if no version is newer than `newer_than`.

        Waits up to `timeout` seconds for such a version.

        Raises:
          KeyError: A name is not published.
        """
        unknown = sorted(set(names) - set(self._layout))
        if unknown:
            raise KeyError(f"names: got {unknown}, expected some of {sorted(self._layout)}.")
        if not self.wait_for(newer_than + 1, timeout):
            return None
        copies = {
            name: {key: np.empty_like(array) for key, array in self._slots[0][name].items()}
            for name in names or self._layout
        }
        progress = self.read(copies, newer_than)
        assert progress is not None
        return Variables(*progress, copies)

    def reduce_private(self) -> Any:
        """Pickles a block in private memory with its contents, unlike `__reduce__`."""
        return _rebuild, (self._layout, self._size, None, self._memory)

    def __reduce__(self) -> Any:
        """Pickles as the path: another process maps the same block, or gets None if it cannot."""
        return _rebuild, (self._layout, self._size, self._path, None)


class VariableClient:
    """Copies newer parameters of the variables that `policy` names into `networks`.

    Only `update` copies, on the thread that calls it, so parameters never change during a forward pass. It
    then calls the policy's `loaded`.

    Args:
      source: a `VariableBlock`, or the client of a node with `variable_block()` and
        `get_variables(names, newer_than)`. The client reads a block directly if it can map it. Otherwise
        it sends one request at a time to the node, and the next `update` raises its error.
      networks: the networks to update: a torch module, or a nest of arrays by variable and entry.
      policy: its `variables` are those to copy. None copies all.
      update_period: number of calls of `update` between two requests for newer parameters.
      timeout: seconds that `update` waits for an answer from the node. None waits without a limit.

    Attributes:
      look_s: seconds between two questions whether the block is still the learner's.
    """

    look_s = 10.0

    def __init__(
        self,
        source: Any,
        networks: Any,
        policy: core.Policy | None = None,
        update_period: int = 1,
        timeout: float | None = 60.0,
    ):
        self.version = -1
        self._source, self._policy = source, policy
        self._block = source if isinstance(source, VariableBlock) else None
        self._is_connected = self._block is not None
        self._named = NamedArrays(networks, () if policy is None else policy.variables)
        self._update_period = whole_number("update_period", update_period, 1)
        self._timeout = timeout
        self._calls = update_period - 1  # The first update() makes a request.
        self._request: concurrent.futures.Future | None = None
        node = find_context()
        self._may_move = self._block is None and node is not None and node.engine == "ray"
        self._lookup: concurrent.futures.Future | None = None
        self._look_at = time.monotonic() + self.look_s

    def update(self, wait: bool = False) -> bool:
        """Copies newer parameters that have arrived, and requests newer ones every `update_period` calls.

        Args:
          wait: whether to request now and to block until the newest parameters are copied.

        Returns:
          Whether the parameters changed.
        """
        before = self.version
        self._calls += 1
        due = wait or self._calls >= self._update_period
        if due and not self._is_connected:
            self._block = self._answer(self._source.futures.variable_block())
            self._is_connected = True
        if self._block is None:
            self._exchange(due, wait)
        elif due:
            self._calls = 0
            self._accept(self._block.read(self._named.arrays, self.version))
            if self._may_move:
                self._look_for_block(wait and self.version == before)
        return self.version != before

    def passed(self, steps: int) -> None:
        """Counts steps as calls of `update`."""
        self._calls += steps

    def copy(self) -> dict[str, Any]:
        """A copy of the acting parameters on the CPU, for `framework.parameters.load_state`."""
        values = state_of(self._named.values)
        return {n: v.cpu().clone() if hasattr(v, "cpu") else v.copy() for n, v in values.items()}

    def _look_for_block(self, now: bool) -> None:
        """Asks for the block again from time to time: the node may have been restarted on another machine.

        With `now`, asks at once, and copies newer parameters.
        """
        if now or (self._lookup is None and time.monotonic() >= self._look_at):
            self._lookup = self._source.futures.variable_block()
            if now:
                concurrent.futures.wait([self._lookup], self._timeout)
        if self._lookup is not None and self._lookup.done():
            lookup, self._lookup = self._lookup, None
            self._look_at = time.monotonic() + self.look_s
            if lookup.exception() is None:  # The node is there at the moment.
                self._block = lookup.result()
        if now and self._block is None:
            self._exchange(True, True)
        elif now and self._block is not None:
            self._accept(self._block.read(self._named.arrays, self.version))

    def _exchange(self, due: bool, wait: bool) -> None:
        """Takes the answer of the node if it has arrived, and sends the next request if it is due."""
        self._take(wait)
        if due and self._request is None:
            # With `wait`, request again even if an answer has just arrived: its request may be older than
            # this call.
            self._calls = 0
            names = tuple(self._named.arrays)
            self._request = self._source.futures.get_variables(names, newer_than=self.version)
            self._take(wait)

    def _take(self, wait: bool) -> None:
        if self._request is None or not (wait or self._request.done()):
            return
        request, self._request = self._request, None
        variables: Variables | None = self._answer(request)
        if variables is not None and variables.version > self.version:
            copy_variables(variables.values, self._named.arrays)
            self._accept(core.Progress(variables.version, variables.env_steps))

    def _accept(self, progress: core.Progress | None) -> None:
        if progress is not None:
            self.version = progress.version
            self._named.loaded()
            if self._policy is not None:
                self._policy.loaded(progress)

    def _answer(self, future: Any) -> Any:
        concurrent.futures.wait([future], self._timeout)
        if not future.done():
            raise TimeoutError(
                f"variables: got no answer from the learner's node within {self._timeout} s, expected one. "
                "Check that the node is running, or raise the timeout."
            )
        return future.result()


def shared_path() -> str | None:
    """The file of this node's block in shared memory; None where shared memory is not available."""
    directory = launch.shared_memory_directory()
    if directory is None:
        return None
    return os.path.join(directory, f"variables-{launch.get_node_context().label}")


def copy_variables(source: Parameters, targets: Parameters) -> None:
    """Copies the variables of `source` that `targets` names into its arrays.

    Raises:
      KeyError: A variable is missing.
      ValueError: The entries of a variable, or their shapes, differ.
    """
    for name, target in targets.items():
        if name not in source:
            raise KeyError(f"{name!r}: not published, only {sorted(source)}. Make both networks alike.")
        state = source[name]
        if state.keys() != target.keys():
            odd = sorted(state.keys() ^ target.keys())
            raise ValueError(
                f"Variable {name!r}: entries {odd} are on one side only. Make both networks alike."
            )
        for key, array in target.items():
            value = state[key]
            if value.shape != array.shape:
                raise ValueError(
                    f"Variable {name!r}, entry {key!r}: got shape {value.shape}, expected {array.shape}. "
                    "Make both networks from the same config and spec."
                )
            np.copyto(array, value)


def _rebuild(layout: Layout, size: int, path: str | None, memory: np.ndarray | None) -> VariableBlock | None:
    if path is None and memory is None:
        return None
    block = VariableBlock.__new__(VariableBlock)
    with contextlib.suppress(OSError):
        block._attach(layout, size, path, memory)
        return block
    return None
