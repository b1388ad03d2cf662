"""Acting with a policy of CartPole: a plain loop, exported files, and HTTP with many clients.

    python -m benchmarks.serving [--clients 64] [--seconds 10]

The parameters are new ones, which take as long as trained ones. The clients are one process of this machine
with a connection each, so they take their part of its cores. Needs the extras `export` and `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from framework.checkpoints import torch_part
from framework.export import export, load
from framework.programs import RunConfig, load_policy, make_agent
from framework.programs.make import environment_spec
from framework.runs.run_folder import RunFolder

ENVIRONMENT = "gymnasium:CartPole-v1"


def make_run(path: pathlib.Path) -> pathlib.Path:
    """A run of PPO with a checkpoint of new parameters."""
    agent, config = make_agent("ppo"), RunConfig(max_env_steps=1, directory=str(path)).decided({})
    spec = environment_spec(agent, ENVIRONMENT, config)
    folder = RunFolder.describe(agent, ENVIRONMENT, config, spec)
    folder.save()
    learner = agent.make_learner(agent.make_networks(spec), spec)
    folder.checkpointer.save(0, {"learner": torch_part({"learner": learner.save(), "steps": 0})})
    return path


def loop(name: str, act: Callable[[Any], Any], calls: int = 3_000) -> None:
    """Prints the time of a call for one observation: the best of five loops."""
    observation = np.zeros((1, 4), np.float32)
    act(observation)
    times = []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(calls):
            act(observation)
        times.append((time.process_time() - begin) / calls * 1e6)
    print(f"{name:12} {min(times):7.1f} CPU µs for one observation, {1e6 / min(times):8,.0f} a second")


async def client(port: int, until: float, seconds: list[float]) -> None:
    """Sends requests one after the other; adds the time of each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"observations": [[0.01, 0.02, 0.03, 0.04]]}).encode()
    head = f"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    while time.perf_counter() < until:
        begin = time.perf_counter()
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        size = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(size)
        seconds.append(time.perf_counter() - begin)
        assert answer.startswith(b"HTTP/1.1 200"), answer
    writer.close()


async def clients(server: psutil.Process, port: int, count: int, duration: float) -> None:
    """Prints the requests per second of `count` clients, and how long an answer takes."""
    for warm_up in (True, False):
        seconds: list[float] = []
        begin, used = time.perf_counter(), sum(server.cpu_times()[:2])
        until = begin + (1.0 if warm_up else duration)
        await asyncio.gather(*[client(port, until, seconds) for _ in range(count)])
    rate = len(seconds) / (time.perf_counter() - begin)
    middle, late = np.quantile(seconds, [0.5, 0.99]) * 1e3
    each = (sum(server.cpu_times()[:2]) - used) / len(seconds) * 1e6
    print(
        f"{count:3} clients  {rate:7,.0f} requests/s, p50 {middle:.1f} ms, p99 {late:.1f} ms, "
        f"{each:.0f} CPU µs of the server for each"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(pathlib.Path(folder) / "run")
        policy = load_policy(run)
        loop("load_policy", policy)
        for kind in ("torch", "onnx"):
            loop(kind, load(export(policy, folder, format=kind)))
        command = [sys.executable, "-m", "framework.commands", "serve", str(run), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            for count in (1, options.clients):
                asyncio.run(clients(psutil.Process(server.pid), port, count, options.seconds))
        finally:
            server.terminate()
            server.wait(timeout=30.0)


if __name__ == "__main__":
    main()
