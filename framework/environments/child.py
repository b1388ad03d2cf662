"""The child process of `ProcessEnvironment`: steps its group of envs until told to stop."""

from __future__ import annotations

import functools
import os
import socket
import threading
import traceback

from framework import nest as nests
from framework import specs
from framework.environments import pipes
from framework.environments.factory import build_env
from framework.environments.inline import InlineEnvironment
from framework.environments.single import SingleEnv

# How long the envs may take to close after the parent is done with them, in seconds.
CLOSE_GRACE = 2.0


def main(connection_fd: int, lifeline_fd: int) -> None:
    """Serves the parent at the other end of `connection_fd`.

    `lifeline_fd` is a pipe that the parent holds open: when it closes, the parent is gone or done.
    """
    connection = socket.socket(fileno=connection_fd)
    finished = threading.Event()
    threading.Thread(target=_watch, args=(lifeline_fd, finished), name="lifeline", daemon=True).start()
    try:
        _serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The parent is gone, so no process needs the answer.
    finally:
        finished.set()


def _watch(lifeline_fd: int, finished: threading.Event) -> None:
    """Ends this process when the parent is gone, even if a step hangs."""
    os.read(lifeline_fd, 1)
    if not finished.wait(CLOSE_GRACE):
        os._exit(1)


def _serve(connection: socket.socket) -> None:
    if connection.recv(1) != pipes.DATA:
        return
    source, seeds, first_env, num_envs = pipes.receive_message(connection)
    envs: list[SingleEnv] = []
    environment = None
    try:
        try:
            for seed in seeds:
                envs.append(build_env(source, seed))
            _say_spec(connection, envs[0].spec)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if not descriptors:
                raise EOFError("the parent gave up")
            spec = envs[0].spec
            arena = pipes.Arena(descriptors[0], pipes.shared_size(spec, num_envs))
            os.close(descriptors[0])
            rows = slice(first_env, first_env + len(envs))
            shared = pipes.SharedArrays(spec, num_envs, arena)
            environment = InlineEnvironment(
                source.name,
                [functools.partial(_hand_over, env) for env in envs],
                first_env=first_env,
                allocate=lambda shape, dtype: arena.allocate((num_envs, *shape[1:]), dtype)[rows],
            )
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            _say_failure(connection, error)
            connection.recv(1)  # The parent hangs up when it has heard of the others, too.
            return
        connection.sendall(pipes.DONE)
        _answer(connection, environment, shared, rows)
    finally:
        if environment is not None:
            environment.close()
        else:
            for env in envs:
                env.close()


def _hand_over(env: SingleEnv) -> SingleEnv:
    return env


def _say_spec(connection: socket.socket, spec: specs.EnvironmentSpec) -> None:
    pipes.send_message(connection, spec)


def _say_failure(connection: socket.socket, error: Exception) -> None:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    pipes.send_message(connection, (f"{type(error).__name__}: {error}", str(error), text), pipes.FAILED)


def _answer(
    connection: socket.socket, environment: InlineEnvironment, shared: pipes.SharedArrays, rows: slice
) -> None:
    build_action = nests.unflattener(environment.action_spec())
    action = build_action([column[rows] for column in shared.actions])
    active, ended = shared.active[rows], shared.ended[rows]
    while True:
        command = connection.recv(1)
        try:
            if ended.any():
                environment.end_episodes(ended)
                ended[:] = False
            if command == pipes.STEP:
                environment.step(action)
            elif command == pipes.STEP_ENVS:
                environment.step_envs(action, active)
            elif command == pipes.RESET:
                environment.reset()
            elif command == pipes.RENDER:
                (env,) = pipes.INDEX.unpack(pipes.receive_exactly(connection, pipes.INDEX.size))
                pipes.send_message(connection, environment.render(env))
                continue
            else:  # CLOSE, or b"": the parent is gone.
                return
        except Exception as error:
            _say_failure(connection, error)
        else:
            connection.sendall(pipes.DONE)
