"""B environments in child processes, for environments whose steps take long.

A call is a message (method, arguments) to each child and a message (whether it succeeded, result) back.
Actions and time steps are in memory that all processes map. The memory has no name, so no file remains,
whichever process ends first.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import cloudpickle
import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.base import BatchedEnvironment, EnvironmentFault, unrounded
from framework.environments.fields import FieldChecker
from framework.environments.rows import time_step_spec
from framework.environments.states import dumps
from framework.environments.stepping import InlineEnvironment
from framework.environments.suites import EnvironmentSource
from framework.types import MultiAgentTimeStep, Nest
from launch import pickling, platforms, texts
from launch.errors import RemoteTraceback, describe
from launch.seeds import seed_generators

# Seconds that the envs of a child may take to close after the parent has closed its connection.
CLOSE_GRACE_S = 2.0
_CLOSE_S = 5.0  # After these, children that still run are killed.


class _Child:
    """One process and this side of its connection."""

    def __init__(self, rows: slice, memory: int):
        self.rows = rows
        first, last = rows.start, rows.stop - 1
        #: How errors name the envs.
        self.envs = f"env {last}" if first == last else f"envs {first} to {last}"
        self.connection, theirs = Pipe()
        # The child reads the end of its standard input as the end of this process: a poll of the connection
        # for nothing but its end does not return on macOS.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from framework.environments.processes import serve; "
            f"serve({theirs.fileno()}, {memory})"
        )
        # One math thread per child: the parallelism is in the number of children.
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
        # Ctrl-C goes to the whole process group, and Slurm and systemd signal all processes. The parent alone
        # acts on it; a signal that is blocked here stays blocked in the child, from its first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *platforms.OF_ALL_PROCESSES})
        try:
            # multiprocessing's Process would import the user's __main__ again, and need a guard there.
            self.process = subprocess.Popen(
                [platforms.interpreter(), "-c", code],
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.PIPE,
                env=variables,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def close(self) -> None:
        """Tells the process to end."""
        self.connection.close()
        assert self.process.stdin is not None
        self.process.stdin.close()


class ProcessEnvironment(BatchedEnvironment):
    """Steps groups of envs in child processes; observations come back through shared memory.

    An exception in a child is raised here as an `EnvironmentFault` with the child's traceback. A
    child that dies is an `EnvironmentFault` of the present or next call. Children end with `close()`,
    with the last reference to this object, and with this process, however it ends.

    POSIX only: descriptors are handed to the children.
    """

    takes_seed = True

    def __init__(
        self,
        source: EnvironmentSource,
        seeds: Sequence[int | None],
        num_processes: int | None = None,
        *,
        start_timeout: float = 120.0,
        step_timeout: float | None = None,
    ):
        """Starts the children and waits until all environments are built.

        Args:
          source: makes the environments; `launch.pickling` sends it to the children.
          seeds: one per env.
          num_processes: number of children; by default one per usable core, at most one per env.
          start_timeout: seconds that building the environments may take.
          step_timeout: seconds that one call may take; None: as long as the children live.
        """
        self.name = source.name
        self.num_envs = len(seeds)
        wanted = platforms.num_cores() if num_processes is None else num_processes
        if wanted < 1:
            raise ValueError(f"{self.name}: num_processes: got {num_processes}, expected at least 1.")
        self._seeds, self._timeouts = seeds, (start_timeout, step_timeout)
        groups = np.array_split(np.arange(self.num_envs), min(wanted, self.num_envs))
        self._groups = [slice(int(group[0]), int(group[-1]) + 1) for group in groups]
        make_envs = [functools.partial(source.make_env, seed) for seed in seeds]
        pickles = []
        for rows in self._groups:
            build = functools.partial(InlineEnvironment, self.name, make_envs[rows], first_env=rows.start)
            pickles.append(pickling.dumps(build))
        self._start(pickles)

    def __getstate__(self) -> dict[str, Any]:
        """The state of the envs, for pickle. The copy starts processes of its own."""
        kept = {key: vars(self)[key] for key in ("name", "num_envs", "_timeouts", "_groups", "_seeds")}
        return {**kept, "envs": self._call("pickle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        envs = state.pop("envs")
        self.__dict__.update(state)
        self._start(envs)

    def _start(self, pickles: Sequence[bytes]) -> None:
        """Starts one child for each pickle: of its environment or a function that makes it."""
        self._children: list[_Child] = []
        self._broken: str | None = None
        self._slot, self._is_rounded = 0, False
        self._finalizer = weakref.finalize(self, _shut_down, self._children)
        memory = _unnamed_file()
        try:
            for rows in self._groups:
                self._children.append(_Child(rows, memory))
            tasks = [
                (one, rows, self.num_envs, self._seeds[rows.start])
                for one, rows in zip(pickles, self._groups, strict=True)
            ]
            found = [pickle.loads(spec) for spec in self._ask("building", tasks, self._timeouts[0])]
            self.spec = found[0]
            for child, spec in zip(self._children, found, strict=True):
                if spec != self.spec:
                    raise EnvironmentFault(
                        f"{self.name}, {child.envs}: the spec is {spec}, but {self._children[0].envs} have "
                        f"{self.spec}. All envs must have the same spec."
                    )
            self._check_action = FieldChecker(self.name, "action", self.spec.actions, self.num_envs)
            self._slots = _share(memory, self.spec, self.num_envs)
            self._actions = [tree.flatten(action) for _, action, _ in self._slots]
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    @property
    def exact_rewards(self) -> list[np.ndarray] | None:
        return self._slots[self._slot][2] if self._is_rounded else None

    def reset(self) -> dm_env.TimeStep:
        self._slot, self._is_rounded = 1 - self._slot, False
        self._call("reset")
        return self._slots[self._slot][0]

    def step(self, action: Nest) -> dm_env.TimeStep:
        arrays = self._check_action(action)
        self._slot = 1 - self._slot
        for column, array in zip(self._actions[self._slot], arrays, strict=True):
            column[...] = array
        self._is_rounded = any(self._call("step"))
        return self._slots[self._slot][0]

    def repeat_actions(self, num_repeats: int) -> None:
        self._call("repeat_actions", [(num_repeats,)] * len(self._children))

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._call("seed_episodes", [(seeds[child.rows], envs[child.rows]) for child in self._children])

    def end_episodes(self, envs: np.ndarray) -> None:
        self._call("end_episodes", [(envs[child.rows],) for child in self._children])

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
        """Calls `method` of the children's environments, with the arguments of each; returns the results."""
        messages = [(method, self._slot, one) for one in arguments or [()] * len(self._groups)]
        return self._ask(f"{method}()", messages, self._timeouts[1])

    def _ask(self, call: str, messages: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Sends each child its message, and waits for the answers; returns their results."""
        if self._broken is not None:
            raise EnvironmentFault(f"{self.name}: the environment can no longer be used: {self._broken}.")
        # Set until the answers are in, so that an interrupt in between leaves a sign.
        self._broken = "a call was interrupted before the children answered. Make a new environment"
        for child, message in zip(self._children, messages, strict=True):
            try:
                child.connection.send_bytes(pickle.dumps(message, protocol=5))
            except OSError:
                raise self._dead(child) from None
        deadline = None if timeout is None else time.monotonic() + timeout
        results: list[Any] = []
        faults: list[Exception] = []
        for child in self._children:
            try:
                if deadline is not None and not child.connection.poll(max(0.0, deadline - time.monotonic())):
                    self._broken = f"{call} of {child.envs} took longer than {timeout} s"
                    raise EnvironmentFault(f"{self.name}, {child.envs}: {call} took longer than {timeout} s.")
                succeeded, result = child.connection.recv()
            except (EOFError, OSError):
                raise self._dead(child) from None
            if succeeded:
                results.append(result)
            else:
                # A fault of the child's batch names environment and env already.
                text, error = result["message"], result["kind"]
                named = text.startswith(f"{self.name}, env")
                headline = text if named else f"{self.name}, {child.envs}: {error}: {text}"
                kind = NotImplementedError if error == "NotImplementedError" else EnvironmentFault
                faults.append(kind(headline))
                faults[-1].__cause__ = RemoteTraceback(
                    str(child.process.pid), result["frames"], result["place"], "process"
                )
        self._broken = None
        if faults:
            raise faults[0]
        return results

    def _dead(self, child: _Child) -> EnvironmentFault:
        try:
            code = child.process.wait(timeout=5.0)
            how, advice = texts.how_it_ended(code), texts.why_killed(code)
        except subprocess.TimeoutExpired:
            how, advice = "closed its connection", ""
        self._broken = f"the process of {child.envs} {how}"
        return EnvironmentFault(
            f"{self.name}, {child.envs}: the environment's process {child.process.pid} {how} during a run. "
            f"Its output is above. Use stepping='inline' to see the failure itself.{advice}"
        )

    def close(self) -> None:
        """Ends the children, and kills those that do not end by themselves in time."""
        self._broken = self._broken or "it is closed"
        self._finalizer()


def _shut_down(children: list[_Child]) -> None:
    """Ends all children; called once, by `close()`, garbage collection or the interpreter's end."""
    for child in children:
        child.close()
    deadline = time.monotonic() + _CLOSE_S
    for child in children:
        try:
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
    children.clear()


def _unnamed_file() -> int:
    """A descriptor of an empty file without a name, in memory where the system has such files."""
    if platforms.has("memfd"):
        return os.memfd_create("repertory-environments")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _share(
    descriptor: int, spec: specs.EnvironmentSpec, num_envs: int
) -> list[tuple[dm_env.TimeStep, Nest, list[np.ndarray]]]:
    """Two time steps of B envs with their actions and exact rewards, in shared memory; OSError without room.

    They are used in turn, so the previous time step is intact while the next is written.
    """
    exact = [specs.Array(leaf.shape, np.float64) for leaf in tree.flatten(spec.rewards)]
    shared = (time_step_spec(spec), spec.actions, exact)
    fields = [
        (str(index), leaf.dtype, (num_envs, *leaf.shape)) for index, leaf in enumerate(tree.flatten(shared))
    ]
    layout = np.dtype(fields, align=True)
    size = 2 * layout.itemsize
    platforms.reserve(descriptor, os.fstat(descriptor).st_size, size)
    slots = np.frombuffer(mmap.mmap(descriptor, size), layout)
    build = nests.unflattener(shared)
    return [build([slots[name][slot] for name, *_ in fields]) for slot in range(2)]


def serve(connection_fd: int, memory: int) -> None:
    """The child process: serves the parent at the other end of `connection_fd` until it closes that."""
    platforms.outlive_signals()
    parent = os.dup(0)
    with open(os.devnull) as nothing:  # What environments and their programs read.
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with_parent, args=(parent,), name="parent", daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        _serve(Connection(connection_fd), memory)


def _end_with_parent(parent: int) -> None:
    """Ends this process `CLOSE_GRACE_S` seconds after the parent is gone or done, even if a step hangs."""
    os.read(parent, 1)  # returns when the parent's end was closed
    time.sleep(CLOSE_GRACE_S)  # the process ends by itself in this time, unless an env hangs
    os._exit(1)


def _serve(connection: Connection, memory: int) -> None:
    pickled, rows, num_envs, seed = connection.recv()
    seed_generators(seed)  # Environments may use the global ones.
    try:
        made = pickle.loads(pickled)
        environment: InlineEnvironment = made() if callable(made) else made
    except (Exception, SystemExit) as error:
        _answer_failure(connection, error)
        connection.poll(None)  # until the parent, which waits for the others too, closes the connection
        return
    with environment:
        slots = tree.map_structure(lambda array: array[rows], _share(memory, environment.spec, num_envs))
        columns = [tree.flatten(timestep) for timestep, _, _ in slots]
        _answer(connection, True, cloudpickle.dumps(environment.spec))
        while True:
            method, slot, arguments = connection.recv()
            try:
                if method == "step":
                    arguments = (slots[slot][1],)
                if method == "pickle":
                    result: Any = dumps(environment)
                else:
                    result = getattr(environment, method)(*arguments)
            except (Exception, SystemExit) as error:
                _answer_failure(connection, error)
                continue
            if isinstance(result, (dm_env.TimeStep, MultiAgentTimeStep)):
                for column, array in zip(columns[slot], tree.flatten(result), strict=True):
                    column[...] = array
                for column, array in zip(slots[slot][2], unrounded(environment, result), strict=True):
                    column[...] = array
                result = environment.exact_rewards is not None
            _answer(connection, True, result)


def _answer(connection: Connection, succeeded: bool, result: Any) -> None:
    connection.send_bytes(pickle.dumps((succeeded, result), protocol=5))


def _answer_failure(connection: Connection, error: BaseException) -> None:
    _answer(connection, False, describe(error))
