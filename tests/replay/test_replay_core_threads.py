"""Many threads on embedded tables: no torn row, exact counts, nothing left behind."""

import threading

import numpy as np
import pytest
from background import Background
from embedded_table import make
from served_table import counts

from framework.replay import rate_limiters as rl
from framework.replay import selectors

WIDTH = 64


def checksummed(rng, n):
    data = rng.integers(0, 1 << 30, (n, WIDTH))
    data[:, -1] = data[:, :-1].sum(1)
    return data


def run(*functions):
    for call in [Background(function) for function in functions]:
        call.result()


@pytest.mark.parametrize("sampler", ["Uniform", "Prioritized"])
def test_no_torn_rows(sampler):
    options = (1.0,) if sampler == "Prioritized" else ()
    client = make(getattr(selectors, sampler)(*options), size=200)
    start = threading.Barrier(6)
    done = threading.Event()

    def write(seed):
        rng = np.random.default_rng(seed)
        start.wait(10)
        with client.batch_writer() as writer:
            for _ in range(150):
                rows = writer.append("s", {"x": checksummed(rng, 32)})
                stacked = np.stack([rows[:-1], rows[1:]], 1)
                writer.create_items("t", writer.slice("s", "x", stacked), rng.random(31) + 0.1)
                writer.release("s", rows)

    def read():
        start.wait(10)
        while not done.is_set():
            sample = client.sample_batch("t", 64, timeout=30)
            assert (sample.data[..., :-1].sum(-1) == sample.data[..., -1]).all()
            client.update_priorities("t", sample.info.key, np.full(64, 0.5))

    def writers():
        run(lambda: write(1), lambda: write(2), lambda: write(3))
        done.set()

    run(writers, read, read, read)
    assert client.server_info()["t"].current_size == 200
    client.reset("t")
    assert client.store.streams["s"].num_rows == 0


def test_ratio_is_exact_with_many_threads():
    limiter = rl.SampleToInsertRatio(3.0, 10, 40.0)
    client = make(limiter=limiter, size=1000)
    table = client.tables["t"]

    def look():
        """What a waiting request has drawn counts, once."""
        with table.lock:
            assert limiter.min_diff <= limiter.diff <= limiter.max_diff or len(table) <= 10

    def write():
        with client.batch_writer() as writer:
            for value in range(200):
                rows = writer.append("s", {"x": np.array([value])})
                writer.create_items("t", writer.slice("s", "x", rows), timeout=30)
                writer.release("s", rows)
                look()

    def read():
        for _ in range(75):
            client.sample_batch("t", 8, timeout=30)
            look()

    run(write, write, read, read)
    assert counts(client) == (400, 1200)
