"""B environments in child processes, for environments whose steps take long."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

import dm_env
import numpy as np

from framework.environments import pipes
from framework.environments.base import ActionChecker, BatchedEnvironment, Buffers, EnvironmentFault
from framework.types import Nest


class _Child:
    """One process and this side of its connection."""

    def __init__(self, first_env: int, num_envs: int):
        self.first_env = first_env
        self.num_envs = num_envs
        self.connection, theirs = socket.socketpair()
        read_end, self.lifeline = os.pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from framework.environments.child import main; "
            f"main({theirs.fileno()}, {read_end})"
        )
        # One math thread per child: the parallelism is in the number of children.
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
        # Ctrl-C goes to the whole process group. The parent alone acts on it; a signal that is blocked here
        # stays blocked in the child, from its first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(), read_end),
                stdin=subprocess.DEVNULL,
                env=variables,
            )
        except BaseException:
            self.connection.close()
            os.close(self.lifeline)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            os.close(read_end)

    @property
    def envs(self) -> str:
        """How errors name the envs."""
        last = self.first_env + self.num_envs - 1
        return f"env {last}" if self.num_envs == 1 else f"envs {self.first_env} to {last}"


class ProcessEnvironment(BatchedEnvironment):
    """Steps groups of envs in child processes; observations come back through shared memory.

    An exception in a child is raised here as an `EnvironmentFault` with the child's traceback. A
    child that dies is an `EnvironmentFault` of the present or next call. Children end with `close()`,
    with the last reference to this object, and with this process, however it ends.

    POSIX only: descriptors are handed to the children.
    """

    can_step_envs = True
    can_end_episodes = True

    def __init__(
        self,
        source: Any,
        seeds: Sequence[int | None],
        num_processes: int | None = None,
        *,
        start_timeout: float = 120.0,
        step_timeout: float | None = None,
        close_timeout: float = 5.0,
    ):
        """Starts the children and waits until all environments are built.

        Args:
          source: a `suites.Source`; it is sent to the children by cloudpickle.
          seeds: one per env.
          num_processes: how many children; by default one per usable core, at most one per env.
          start_timeout: seconds that building the environments may take.
          step_timeout: seconds that one call may take; None: as long as the children live.
          close_timeout: seconds that children have to close their environments before they are killed.
        """
        self.name = source.name
        self.num_envs = len(seeds)
        if not hasattr(socket, "send_fds"):
            raise ValueError(
                f"{self.name}: stepping='processes' needs a POSIX system. Use stepping='inline'."
            )
        wanted = num_processes if num_processes is not None else _usable_cores()
        if wanted < 1:
            raise ValueError(f"{self.name}: num_processes: got {num_processes}, expected at least 1.")
        self._step_timeout = step_timeout
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._broken: str | None = None
        self._finalizer = weakref.finalize(self, _shut_down, self._children, self._selector, close_timeout)
        try:
            for group in np.array_split(np.arange(self.num_envs), min(wanted, self.num_envs)):
                child = _Child(int(group[0]), len(group))
                self._children.append(child)
                self._selector.register(child.connection, selectors.EVENT_READ, child)
                envs = slice(child.first_env, child.first_env + child.num_envs)
                pipes.send_message(
                    child.connection, (source, list(seeds[envs]), child.first_env, self.num_envs)
                )
            self._share(start_timeout)
        except BaseException:
            self.close()
            raise

    def _share(self, timeout: float) -> None:
        """Learns the spec from the children and gives them the memory for it."""
        found = self._collect("building", timeout)
        self.spec = found[0]
        for child, spec in zip(self._children, found, strict=True):
            if spec != self.spec:
                raise EnvironmentFault(
                    f"{self.name}, {child.envs}: the spec is {spec}, but {self._children[0].envs} have "
                    f"{self.spec}. All envs must have the same spec."
                )
        size = pipes.shared_size(self.spec, self.num_envs)
        descriptor = pipes.make_memory(size)
        try:
            arena = pipes.Arena(descriptor, size)
            for child in self._children:
                socket.send_fds(child.connection, [b"m"], [descriptor])
        finally:
            os.close(descriptor)
        self._shared = pipes.SharedArrays(self.spec, self.num_envs, arena)
        self._buffers = Buffers(self.spec, self.num_envs, arena.allocate)
        self._check_action = ActionChecker(self.name, self.spec.actions, self.num_envs)
        self._collect("building", timeout)

    def reset(self) -> dm_env.TimeStep:
        self._command(pipes.RESET)
        self._buffers.flip()
        self._collect("reset()", self._step_timeout)
        return self._buffers.timestep()

    def step(self, action: Nest) -> dm_env.TimeStep:
        self._put_action(action)
        self._command(pipes.STEP)
        self._buffers.flip()
        self._collect("step()", self._step_timeout)
        return self._buffers.timestep()

    def step_envs(self, action: Nest, active: np.ndarray) -> dm_env.TimeStep:
        self._put_action(action)
        self._shared.active[:] = active
        self._command(pipes.STEP_ENVS)
        self._collect("step()", self._step_timeout)
        return self._buffers.timestep()

    def end_episodes(self, envs: np.ndarray) -> None:
        self._shared.ended |= envs  # the children look at it before their next step

    def _put_action(self, action: Nest) -> None:
        for column, array in zip(self._shared.actions, self._check_action(action), strict=True):
            column[...] = array

    def render(self, env: int = 0) -> np.ndarray:
        for child in self._children:
            if child.first_env <= env < child.first_env + child.num_envs:
                self._command(pipes.RENDER + pipes.INDEX.pack(env - child.first_env), [child])
                return self._collect("render()", self._step_timeout, [child])[0]
        raise IndexError(f"{self.name}: env {env} of {self.num_envs}")

    def _command(self, command: bytes, children: Sequence[_Child] | None = None) -> None:
        if self._broken is not None:
            raise EnvironmentFault(f"{self.name}: the environment can no longer be used: {self._broken}.")
        # Set until the answers are in, so that an interrupt in between leaves a sign.
        self._broken = "a call was interrupted before the children answered. Make a new environment"
        for child in children or self._children:
            try:
                child.connection.sendall(command)
            except OSError:
                raise self._dead(child) from None

    def _collect(
        self, call: str, timeout: float | None, children: Sequence[_Child] | None = None
    ) -> list[Any]:
        """Waits for one answer of each child; returns the messages (None where there is none)."""
        asked = list(children or self._children)
        answers: dict[_Child, Any] = {}
        faults: dict[int, EnvironmentFault] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(answers) < len(asked):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._selector.select(left)
            if not ready:
                late = ", ".join(child.envs for child in asked if child not in answers)
                self._broken = f"{call} of {late} took longer than {timeout} s"
                raise EnvironmentFault(f"{self.name}, {late}: {call} took longer than {timeout} s.")
            for key, _ in ready:
                child = key.data
                try:
                    tag = child.connection.recv(1)
                    message = None if tag in (b"", pipes.DONE) else pipes.receive_message(child.connection)
                except (OSError, EOFError):
                    tag, message = b"", None
                if not tag:
                    dead = self._dead(child)
                    raise faults.get(child.first_env, dead)
                if tag == pipes.FAILED:
                    faults[child.first_env] = _remote_fault(self.name, child, message)
                answers[child] = message
        self._broken = None
        if faults:
            raise faults[min(faults)]  # the same one whichever child answers first
        return [answers[child] for child in asked]

    def _dead(self, child: _Child) -> EnvironmentFault:
        try:
            code = child.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
        self._broken = f"the process of {child.envs} {how}"
        return EnvironmentFault(
            f"{self.name}, {child.envs}: the environment's process {child.process.pid} {how} during a run. "
            "Its output is above. Use stepping='inline' to see the failure itself."
        )

    def close(self) -> None:
        """Ends the children; killed if they do not end by themselves in time."""
        self._broken = self._broken or "it is closed"
        self._finalizer()


def _remote_fault(name: str, child: _Child, message: Any) -> EnvironmentFault:
    summary, text, trace = message
    # A fault of the child's batch names environment and env already.
    headline = text if text.startswith(f"{name}, env") else f"{name}, {child.envs}: {summary}"
    return EnvironmentFault(f"{headline}\n\nIn child process {child.process.pid}:\n{trace}")


def _shut_down(children: list[_Child], selector: selectors.BaseSelector, timeout: float) -> None:
    """Ends all children; called once, by `close()`, garbage collection or the interpreter's end."""
    for child in children:
        with contextlib.suppress(OSError):  # gone already; it is waited for below all the same
            child.connection.sendall(pipes.CLOSE)
        child.connection.close()
        os.close(child.lifeline)
    deadline = time.monotonic() + timeout
    for child in children:
        try:
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
    children.clear()
    selector.close()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
