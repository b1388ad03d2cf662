"""Samples for TensorFlow: ``as_tf`` beside our own ``Dataset`` and dm-reverb's ``TrajectoryDataset``.

    python -m benchmarks.replay.tf_data [--seconds 0.5] [--rounds 5]

Items are transitions of two observations, action, reward and discount, in batches of 256. The
contenders take turns; the figures are samples per CPU-second of all processes that take part, the best round
of each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import tensorflow as tf

from benchmarks.common import measure
from benchmarks.replay.ours import BATCH, columns, fill, table
from framework import replay
from framework.datasets import Dataset, as_tf

SHAPES = {"float32[4]": ((4,), np.float32, 20_000), "uint8[4, 84, 84]": ((4, 84, 84), np.uint8, 2_000)}
_BATCHES = 8  # of a call of the graph


def of_graph(dataset: Any) -> Callable[[], Any]:
    """Takes ``_BATCHES`` batches in a ``tf.function``."""

    @tf.function
    def take(iterator: Any) -> Any:
        rewards = tf.constant(0.0)
        for _ in tf.range(_BATCHES):
            rewards += next(iterator).data.reward[0]
        return rewards

    iterator = iter(dataset)
    return lambda: take(iterator)


def of_reverb(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A server of dm-reverb in this process, its fastest way, and the calls that read and end it."""
    import reverb

    shape, dtype, size = SHAPES[name]
    data = {key: column[:64] for key, column in columns(64, shape, dtype).items()}
    signature = {key: tf.TensorSpec(column.shape[1:], column.dtype) for key, column in data.items()}
    selectors, limiter = reverb.selectors, reverb.rate_limiters.MinSize(1)
    native = reverb.Table("t", selectors.Uniform(), selectors.Fifo(), size, limiter, signature=signature)
    server = reverb.Server([native], port=None)
    with server.localhost_client().trajectory_writer(1) as writer:
        for number in range(size):
            writer.append({key: column[number % 64] for key, column in data.items()})
            writer.create_item("t", 1.0, {key: column[-1] for key, column in writer.history.items()})
            writer.flush(20)
    address = f"localhost:{server.port}"
    batches = iter(reverb.TrajectoryDataset.from_table_signature(address, "t", 2 * BATCH).batch(BATCH))
    return lambda: next(batches), server.stop


def serve(pipe: Any, name: str) -> None:
    shape, dtype, size = SHAPES[name]
    server = replay.Server([table(size)], port=None)
    fill(server.localhost_client(), size, shape, dtype).close()
    pipe.send(server.address)
    pipe.recv()
    server.stop()


def of_ours(client: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    own, eager = Dataset(client, "t", BATCH), iter(as_tf(client, "t", batch_size=BATCH))
    return {
        "Dataset": (lambda: next(own), BATCH),
        "as_tf": (lambda: next(eager), BATCH),
        "as_tf in a tf.function": (of_graph(as_tf(client, "t", batch_size=BATCH)), BATCH * _BATCHES),
    }


def show(name: str, calls: dict[str, tuple[Callable[[], Any], int]], pids: list[Any], options: Any) -> None:
    best = dict.fromkeys(calls, 0.0)
    for _ in range(options.rounds):
        for contender, (call, items) in calls.items():
            rate = measure(call, items, options.seconds, runs=1, pids=pids)
            best[contender] = max(best[contender], rate.cpu)
    for contender, rate in best.items():
        print(f"{name:<28}{contender:<28}{rate:>14,.0f}{rate / next(iter(best.values())):>8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a contender in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"TensorFlow {tf.__version__}, numpy {np.__version__}")
    context = multiprocessing.get_context("spawn")
    for name, (shape, dtype, size) in SHAPES.items():
        client = replay.EmbeddedClient([table(size)])
        fill(client, size, shape, dtype)
        calls = of_ours(client)
        stop: Callable[[], Any] = lambda: None  # noqa: E731
        try:
            call, stop = of_reverb(name)
            calls["dm-reverb TrajectoryDataset"] = call, BATCH
        except ImportError:
            print("dm-reverb is not installed")
        show(f"{name}, embedded", calls, [], options)
        client.close()
        pipe, theirs = context.Pipe()
        server = context.Process(target=serve, args=(theirs, name), daemon=True)
        server.start()
        client = replay.Client(pipe.recv())
        show(f"{name}, served", of_ours(client), [server.pid], options)
        client.close()
        pipe.send(None)
        server.join(30)
        stop()


if __name__ == "__main__":
    main()
