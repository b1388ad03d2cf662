"""Many threads on embedded tables: no torn row, exact counts, nothing left behind."""

import numpy as np
from background import Background
from embedded_table import make
from served_table import counts

from framework.replay import rate_limiters as rl

WIDTH = 64


def run(*functions):
    for call in [Background(function) for function in functions]:
        call.result()


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
