"""The back ends that are held to the same answers: ours in this process, ours through messages, dm-reverb.

Parameters that are dm-reverb carry the marker ``reverb``: ``-m reverb`` selects them and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

import numpy as np
import pytest

REVERB = pytest.param("reverb", marks=pytest.mark.reverb, id="dm-reverb")
# What dm-reverb before 0.8 lets pass.
UNCHECKED_BEFORE = {"ratio 0", "negative ratio", "a priority that is no number is refused"}


def load(name):
    if name == "reverb" and importlib.util.find_spec("reverb") is None:
        pytest.skip("dm-reverb is not installed")
    return importlib.import_module(name)


@pytest.fixture(params=["framework.replay", REVERB])
def backend(request):
    return load(request.param)


class Rig:
    """A back end, and servers with clients of one kind."""

    def __init__(self, way):
        self.real = way == "reverb"
        self.reverb = load("reverb" if self.real else "framework.replay")
        self._options = {"local": False} if way == "remote" else {}
        self._servers = []

    def spec(self, shape, dtype):
        if self.real:
            import tensorflow as tf

            return tf.TensorSpec(shape, tf.as_dtype(dtype))
        return self.reverb.TensorSpec(tuple(shape), np.dtype(dtype))

    def serve(self, tables):
        server = self.reverb.Server(tables, port=None)
        self._servers.append(server)
        return self.reverb.Client(f"localhost:{server.port}", **self._options)

    def client(self, signature=None, times=0):
        """A client of the tables "t" and "u", which give the oldest item."""
        reverb = self.reverb
        fifo, limiter = reverb.selectors.Fifo, reverb.rate_limiters.MinSize
        options = {"max_times_sampled": times, "signature": signature}
        return self.serve([reverb.Table(name, fifo(), fifo(), 100, limiter(1), **options) for name in "tu"])

    def stop(self):
        for server in self._servers:
            server.stop()


@pytest.fixture(params=["embedded", "remote", REVERB])
def rig(request):
    rig = Rig(request.param)
    yield rig
    rig.stop()


@pytest.fixture
def skip_if_unchecked():
    """``skip(backend, name)`` where this dm-reverb does not make the check of that name."""

    def skip(backend, name):
        if backend.__name__ == "reverb" and name in UNCHECKED_BEFORE:
            version = importlib.metadata.version("dm-reverb").split(".")
            if tuple(map(int, version[:2])) < (0, 8):
                pytest.skip("this dm-reverb does not check it")

    return skip
