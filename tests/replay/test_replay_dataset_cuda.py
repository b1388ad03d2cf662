"""`Dataset` to a GPU: right however far ahead batches are fetched, with pinned buffers that are reused."""

import numpy as np
import pytest

from framework import replay
from framework.datasets import Dataset

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def filled(n=200):
    limiter = replay.rate_limiters.MinSize(1)
    table = replay.Table("t", replay.selectors.Uniform(), replay.selectors.Fifo(), n, limiter, seed=1)
    client = replay.EmbeddedClient([table])
    writer = client.batch_writer()
    x = np.arange(n)
    rows = writer.append("s", {"x": x, "y": np.repeat(x[:, None].astype(np.float32), 1000, 1)})
    items = {name: writer.slice("s", name, rows) for name in ("x", "y")}
    writer.create_items("t", items, x.astype(float))
    return client


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_batches_arrive_whole(prefetch):
    client = filled()
    with Dataset(client, "t", 128, device="cuda", prefetch=prefetch) as dataset:
        kept = []
        for _ in range(100):
            sample = next(dataset)
            assert sample.data["y"].device.type == "cuda" and isinstance(sample.info.key, np.ndarray)
            assert bool((sample.data["y"] == sample.data["x"][:, None]).all())
            np.testing.assert_array_equal(sample.data["x"].cpu().numpy(), sample.info.priority)
            kept.append(sample)
        # What was handed out stays as it is when buffers are filled again.
        for sample in kept:
            np.testing.assert_array_equal(sample.data["y"][:, -1].cpu().numpy(), sample.info.priority)
        assert len(dataset._transfer._free) <= prefetch + 3


def test_mixed_and_padded_batches():
    client = filled()
    with Dataset(client, {"t": 1.0}, 16, device="cuda", ragged="pad") as dataset:
        sample = next(dataset)
        assert isinstance(sample, replay.PaddedSample) and sample.data["x"].device.type == "cuda"
