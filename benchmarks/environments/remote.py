"""Env steps per second of CartPole in this process, child processes, a server, clients, and gRPC streams.

python -m benchmarks.environments.remote                # the last needs pip install grpcio-tools

The gRPC server is PolyBeast's (Küttler et al., 2019) in miniature: a bidirectional stream for each env, with
an action and a step of its `rpcenv.proto`. Both ends are Python with gRPC here; PolyBeast's are C++.
All step 16 envs with fixed actions. The server is one other process, clients are one for each env.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np

from framework import environments
from framework.environments.remote import environment_server
from framework.environments.remote.external_client import ExternalClient

sys.path.append(os.path.dirname(__file__))  # gRPC looks there for `rpcenv.proto`.

ENVS, SECONDS = 16, 3.0
CARTPOLE = "gymnasium:CartPole-v1"


def main() -> None:
    with socket.socket() as held, tempfile.TemporaryDirectory() as folder:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))  # Keeps the port for the listeners that share it.
        port = held.getsockname()[1]
        key, token = os.path.join(folder, "key"), os.path.join(folder, "token")
        remote = {"key": key}
        serve = [sys.executable, environment_server.__file__, CARTPOLE, "--key", key, "--connect"]
        serve += [f"127.0.0.1:{port}", "--num-envs", str(ENVS)]
        client = [sys.executable, __file__, "client", str(port), token]
        cases: list[tuple[str, list[list[str]], Callable[[], environments.BatchedEnvironment]]] = [
            ("inline", [], lambda: environments.make(CARTPOLE, num_envs=ENVS, stepping="inline")),
            (
                "2 child processes",
                [],
                lambda: environments.make(CARTPOLE, num_envs=ENVS, stepping="processes", num_processes=2),
            ),
            ("1 server", [serve], lambda: _listening(f"remote:tcp://127.0.0.1:{port}", remote)),
            (
                f"{ENVS} clients",
                [client] * ENVS,
                lambda: _listening(f"external:tcp://127.0.0.1:{port}", {"token": token}),
            ),
        ]
        for name, commands, make in cases:
            with _processes(commands), make() as environment:
                environment.reset()
                actions = np.arange(ENVS) % 2
                print(
                    f"{name:20} {_rate(lambda e=environment, a=actions: e.step(a)):9,.0f} env steps/s",
                    flush=True,
                )
        with _processes([[sys.executable, __file__, "grpc", str(port)]]):
            import grpc

            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(timeout=60)
                step = _streams(channel)
                print(f"{'gRPC streams':20} {_rate(step):9,.0f} env steps/s")


def _listening(name: str, options: dict[str, str]) -> environments.BatchedEnvironment:
    return environments.make(name, num_envs=ENVS, options=options)


def _rate(step: Callable[[], object]) -> float:
    for _ in range(50):
        step()
    made, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        step()
        made += ENVS
    return made / (time.perf_counter() - start)


@contextlib.contextmanager
def _processes(commands: list[list[str]]) -> Iterator[None]:
    """Starts processes once the files that they need are there, which this one makes; ends them."""
    waits = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
    started = []
    for command in commands:
        file = next((part for part in command if part.endswith(("/key", "/token"))), __file__)
        code = f"{waits}os.execv(sys.argv[2], sys.argv[2:])"
        quiet = {"stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen([sys.executable, "-c", code, file, *command], **quiet))
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def play_as_client(port: str, token_file: str) -> None:
    """One env as an external client."""
    with open(token_file) as file:
        token = file.read().strip()
    action = {"shape": [], "dtype": "int64", "num_values": 2}
    env = gymnasium.make("CartPole-v1")
    with ExternalClient(f"127.0.0.1:{port}", token, {"shape": [4], "dtype": "float32"}, action) as client:
        while True:
            client.start_episode()
            observation, ended = env.reset()[0], False
            while not ended:
                chosen = client.get_action(observation.tolist())
                observation, reward, terminated, truncated, _ = env.step(chosen)
                client.log_reward(reward)
                ended = terminated or truncated
            client.end_episode(observation.tolist(), truncated)


def serve_grpc(port: str) -> None:
    """A stream for each env: the client sends actions, and gets a step for each."""
    from concurrent import futures

    import grpc

    messages, services = grpc.protos_and_services("rpcenv.proto")

    class Server(services.RPCEnvServerServicer):
        def StreamingEnv(self, requests: Iterator[Any], context: object) -> Iterator[Any]:
            env = gymnasium.make("CartPole-v1")
            observation, steps, total = env.reset()[0], 0, 0.0
            yield _message(messages, observation, 0.0, True, steps, total)
            for request in requests:
                observation, reward, terminated, truncated, _ = env.step(request.action)
                steps, total, done = steps + 1, total + float(reward), terminated or truncated
                if done:
                    observation = env.reset()[0]
                yield _message(messages, observation, float(reward), done, steps, total)
                if done:
                    steps, total = 0, 0.0

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=ENVS))
    services.add_RPCEnvServerServicer_to_server(Server(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def _message(messages: Any, observation: np.ndarray, *rest: Any) -> Any:
    array = messages.NDArray(dtype=observation.dtype.num, shape=observation.shape, data=observation.tobytes())
    names = ("reward", "done", "episode_step", "episode_return")
    return messages.Step(observation=messages.ArrayNest(array=array), **dict(zip(names, rest, strict=True)))


def _streams(channel: Any) -> Callable[[], None]:
    """A function that steps all envs once: an action to each stream, then a step from each."""
    import queue

    import grpc

    messages, services = grpc.protos_and_services("rpcenv.proto")
    stub = services.RPCEnvServerStub(channel)
    actions: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(ENVS)]
    streams = [stub.StreamingEnv(iter(waiting.get, None)) for waiting in actions]
    for stream in streams:
        next(stream)

    def step() -> None:
        for env, waiting in enumerate(actions):
            waiting.put(messages.Action(action=env % 2))
        for stream in streams:
            array = next(stream).observation.array
            np.frombuffer(array.data, np.float32).reshape(tuple(array.shape))

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        play_as_client(*sys.argv[2:])
    elif sys.argv[1:2] == ["grpc"]:
        serve_grpc(sys.argv[2])
    else:
        main()
