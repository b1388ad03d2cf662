"""Wrong arguments are errors of the same kind on dm-reverb and on our replay."""

from __future__ import annotations

import pytest


def _limiter(kind, *args):
    return lambda backend: getattr(backend.rate_limiters, kind)(*args)


def _table(**changes):
    def make(backend):
        fifo, limiter = backend.selectors.Fifo, backend.rate_limiters.MinSize(1)
        arguments = {"name": "t", "sampler": fifo(), "remover": fifo(), "max_size": 1}
        arguments["rate_limiter"] = limiter
        return backend.Table(**{**arguments, **changes})

    return make


def _client(call):
    def make(backend):
        with_table = backend.Server([_table()(backend)], port=None)
        try:
            call(with_table.localhost_client())
        finally:
            with_table.stop()

    return make


# name: (what is made or called, the kind of error)
ERRORS = {
    "no tables": (lambda backend: backend.Server([], port=None), ValueError),
    "two tables of one name": (
        lambda backend: backend.Server([_table()(backend), _table()(backend)], port=None),
        ValueError,
    ),
    "empty name": (_table(name=""), ValueError),
    "no room": (_table(max_size=0), ValueError),
    "negative room": (_table(max_size=-1), ValueError),
    "ratio 0": (_limiter("SampleToInsertRatio", 0.0, 1, 10.0), ValueError),
    "negative ratio": (_limiter("SampleToInsertRatio", -1.0, 1, 10.0), ValueError),
    "window too narrow": (_limiter("SampleToInsertRatio", 1.0, 1, 0.5), ValueError),
    "window too narrow for the ratio": (_limiter("SampleToInsertRatio", 4.0, 1, 3.9), ValueError),
    "a window that begins too late": (_limiter("SampleToInsertRatio", 1.0, 1, (5.0, 10.0)), ValueError),
    "minimum 0": (_limiter("MinSize", 0), ValueError),
    "minimum 0 with a ratio": (_limiter("SampleToInsertRatio", 1.0, 0, 10.0), ValueError),
    "insert into no table": (_client(lambda client: client.insert([1], {})), ValueError),
    "insert into an unknown table": (_client(lambda client: client.insert([1], {"u": 1.0})), ValueError),
    "sample of an unknown table": (_client(lambda client: list(client.sample("u"))), RuntimeError),
    "reset of an unknown table": (_client(lambda client: client.reset("u")), RuntimeError),
    "mutation of an unknown table": (
        _client(lambda client: client.mutate_priorities("u", updates={1: 1.0})),
        RuntimeError,
    ),
    "steps of columns of different lengths": (
        _client(lambda client: (_two_lengths(client), next(iter(client.sample("t"))))),
        ValueError,
    ),
}


def _two_lengths(client):
    writer = client.trajectory_writer(num_keep_alive_refs=2)
    for step in range(2):
        writer.append({"a": step, "b": step})
    writer.create_item("t", 1.0, {"a": writer.history["a"][-2:], "b": writer.history["b"][-1:]})
    writer.flush()
    writer.close()


@pytest.mark.parametrize("name", ERRORS)
def test_errors(backend, name, skip_if_unchecked):
    skip_if_unchecked(backend, name)
    call, kind = ERRORS[name]
    with pytest.raises(kind):
        call(backend)
