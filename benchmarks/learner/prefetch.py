"""Learner steps per second on batches from replay, for each number of batches fetched ahead.

    python -m benchmarks.learner.prefetch --device cuda --batch-size 256

DQN at the shapes of Atari: a batch is gathered in this process, goes to the device and is learned from. The
first row learns from one batch that lies on the device already, which is what fetching ahead can reach at
most, and by which the others are divided. On a GPU, batches are gathered in pinned memory; the last row
copies from other memory. `--idle` leaves the learner out: the rate at which batches arrive.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.learner.step import make_agent, make_spec
from framework import replay
from framework.datasets import Dataset
from framework.networks import as_tensors
from framework.types import Transition


def filled_table(size: int) -> replay.EmbeddedClient:
    """Replay with `size` random transitions of Atari, 56 kB each."""
    limiter = replay.rate_limiters.MinSize(1)
    uniform, oldest = replay.selectors.Uniform(), replay.selectors.Fifo()
    client = replay.EmbeddedClient([replay.Table("replay", uniform, oldest, size, limiter, seed=1)])
    writer, random = client.batch_writer(), np.random.default_rng(0)
    for begin in range(0, size, 500):
        count = min(500, size - begin)
        images = [random.integers(0, 256, (count, 84, 84, 4), np.uint8) for _ in range(2)]
        columns = {
            "observation": images[0],
            "action": random.integers(0, 6, count),
            "reward": random.normal(size=count).astype(np.float32),
            "discount": np.ones(count, np.float32),
            "next_observation": images[1],
        }
        rows = writer.append("transitions", columns)
        items = {name: writer.slice("transitions", name, rows) for name in columns}
        writer.create_items("replay", items, np.ones(count))
    return client


def rate(step: Callable[[], Any], seconds: float, device: str) -> float:
    """Steps per second on the clock."""

    def wait() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    for _ in range(5):
        step()
    wait()
    made, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        step()
        made += 1
        if made % 20 == 0:  # A device must not fall behind by more than a few steps.
            wait()
    wait()
    return made / (time.perf_counter() - begin)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--items", type=int, default=10_000, help="in the table")
    parser.add_argument("--prefetch", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row")
    parser.add_argument("--idle", action="store_true", help="without a learner")
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    client, spec = filled_table(options.items), make_spec("dqn")
    agent = make_agent("dqn", tiny=True, device=options.device)
    learner = agent.make_learner(agent.make_networks(spec), spec)

    def learn(sample: Any) -> None:
        if not options.idle:
            learner.step(sample._replace(data=Transition(**sample.data)))

    def fetch_and_learn(dataset: Dataset) -> None:
        learn(next(dataset))

    def copy_and_learn(dataset: Dataset) -> None:
        sample = next(dataset)
        learn(sample._replace(data=as_tensors(sample.data, options.device)))

    with Dataset(client, "replay", options.batch_size, prefetch=0) as dataset:
        sample = next(dataset)
    size = sum(leaf.nbytes for leaf in sample.data.values()) / 1e6
    print(f"batches of {options.batch_size}, {size:.1f} MB, on {options.device}, torch {torch.__version__}")
    print("| batches fetched ahead | steps/s | MB/s |\n|---|---|---|")
    rows: list[dict[str, Any]] = []

    def tell(name: str, steps: float, megabytes: str) -> None:
        rows.append({"row": f"batches ahead: {name}", "unit": "steps/s", "value": steps})
        if rows[:-1] and not options.idle:
            rows[-1] |= {"of": "one batch on the device", "of_value": rows[0]["value"]}
        print(f"| {name} | {steps:.1f} | {megabytes} |", flush=True)

    if not options.idle:
        there = sample._replace(data=as_tensors(sample.data, options.device))
        tell("none needed", rate(lambda: learn(there), options.seconds, options.device), "")
    pinned = torch.device(options.device).type == "cuda"
    ways = [(str(ahead), ahead, options.device, fetch_and_learn) for ahead in options.prefetch]
    if pinned:
        ways.append(("2, not pinned", 2, "cpu", copy_and_learn))
    for name, ahead, device, step in ways:
        with Dataset(client, "replay", options.batch_size, device=device, prefetch=ahead) as dataset:
            steps = rate(functools.partial(step, dataset), options.seconds, options.device)
        tell(name, steps, f"{steps * size:,.0f}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
