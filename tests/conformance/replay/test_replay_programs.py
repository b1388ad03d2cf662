"""Small programs as users of dm-reverb write them, run on dm-reverb and on ours: the same values come out."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def reverb(backend):
    return backend


def uniform(reverb, name="t", **options):
    of, limiter = reverb.selectors, reverb.rate_limiters.MinSize(1)
    return reverb.Table(name, of.Uniform(), of.Fifo(), 100, limiter, **options)


@pytest.fixture
def client(reverb):
    server = reverb.Server([uniform(reverb), uniform(reverb, "u")], port=None)
    yield reverb.Client(f"localhost:{server.port}")
    server.stop()


def plain(sample):
    """Lists of numbers, whatever the kind of array."""
    if isinstance(sample, list):
        return [plain(step) for step in sample]
    return [np.asarray(leaf).tolist() for leaf in sample.data]


def kinds_of_errors(*calls):
    kinds = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        kinds.append("ValueError" if isinstance(error.value, ValueError) else "RuntimeError")
    return kinds


def test_older_writer(client):
    with client.writer(max_sequence_length=3) as writer:
        for i in range(4):
            writer.append([np.int64(i), np.float32(10 * i)])
        writer.create_item("t", num_timesteps=3, priority=1.0)
        writer.create_item(table="u", num_timesteps=1, priority=2.0)
    assert plain(next(client.sample("t"))) == [[1, 10.0], [2, 20.0], [3, 30.0]]
    assert plain(next(client.sample("u"))) == [[3, 30.0]]
    assert next(client.sample("u"))[0].info.priority == 2.0


def test_older_writer_of_sequences(client):
    writer = client.writer(4, delta_encoded=True, chunk_length=2, max_in_flight_items=1)
    writer.append_sequence({"x": np.arange(6), "y": np.ones((6, 2))})
    for length in (4, 1, 2):
        writer.create_item("t", length, 1.0)
    writer.close()
    lengths = {len(sample) for sample in client.sample("t", 60)}
    assert lengths == {1, 2, 4}
    assert {plain(sample)[-1][0] for sample in client.sample("t", 10)} == {5}
    assert kinds_of_errors(writer.close) == ["ValueError"]


def test_errors_of_the_older_writer(client):
    with client.writer(2) as writer:
        writer.append([1])
        assert set(
            kinds_of_errors(
                lambda: client.writer(0),
                lambda: client.writer(2, chunk_length=3),
                lambda: client.writer(2, max_in_flight_items=0),
                lambda: writer.create_item("t", 0, 1.0),
                lambda: writer.create_item("t", 2, 1.0),  # one step was appended
            )
        ) == {"ValueError"}


def test_parts_of_columns(client):
    writer = client.trajectory_writer(5)
    for i in range(5):
        writer.append({"a": np.int64(i)})
    column = writer.history["a"][-4:]
    parts = column[1:3], column[[0, 2]], list(column), list(writer.history["a"])
    assert [len(part) for part in parts] == [2, 2, 4, 5]
    assert column[-1].is_squeezed and not column[1:3].is_squeezed
    assert column[-1].shape == () and column[1:3].shape == (2,)
    item = {"tail": column[1:3], "last": column[-1]}
    writer.create_item("t", 1.0, item)
    writer.flush()
    sample = next(client.sample("t", emit_timesteps=False))
    assert sorted(plain(sample), key=str) == [4, [2, 3]]
    assert kinds_of_errors(lambda: writer.create_item("nowhere", 1.0, item)) == ["ValueError"]


def test_columns_may_be_configured_at_any_time(client):
    writer = client.trajectory_writer(2)
    writer.configure(("a",), num_keep_alive_refs=2, max_chunk_length=1)
    for i in range(3):
        writer.append({"a": i})
    writer.configure(("a",), num_keep_alive_refs=2, max_chunk_length=2)
    writer.append({"a": 3})
    writer.create_item("t", 1.0, {"x": writer.history["a"][-2:]})
    writer.flush()
    assert plain(next(client.sample("t", emit_timesteps=False))) == [[2, 3]]
    assert (
        kinds_of_errors(
            lambda: writer.configure(("a",), num_keep_alive_refs=0, max_chunk_length=1),
            lambda: writer.configure(("a",), num_keep_alive_refs=1, max_chunk_length=2),
        )
        == ["ValueError"] * 2
    )


def test_checkpointers_have_their_old_place(reverb, tmp_path):
    checkpointer = reverb.platform.checkpointers_lib.DefaultCheckpointer(path=str(tmp_path))
    server = reverb.Server([uniform(reverb)], port=None, checkpointer=checkpointer)
    client = server.localhost_client()
    client.insert([np.int64(7)], {"t": 1.0})
    assert str(tmp_path) in client.checkpoint()
    server.stop()
    checkpointer = reverb.checkpointers.DefaultCheckpointer(str(tmp_path))
    server = reverb.Server([uniform(reverb)], port=None, checkpointer=checkpointer)
    assert plain(next(server.localhost_client().sample("t"))) == [[7]]
    server.stop()


def test_items_by_patterns(reverb, client):
    structured = reverb.structured
    if reverb.__name__ == "reverb" and not hasattr(structured, "constant_priority_fn"):
        pytest.skip("this dm-reverb has no priorities of patterns")
    step = {"a": None, "b": None}
    reference = structured.create_reference_step(step)
    create, condition = structured.create_config, structured.Condition
    pair = {"x": reference["a"][-2:], "y": reference["b"][-1]}
    last = structured.pattern_from_transform(step, lambda step: {"z": step["a"][-1]})
    two = structured.constant_priority_fn(2.0)
    configs = [
        create(pattern=pair, table="t", conditions=[condition.step_index() >= 2]),
        create(last, "u", [condition.is_end_episode()], priority=two),
    ]
    writer = client.structured_writer(configs)
    for i in range(5):
        writer.append({"a": np.int64(i), "b": np.float32(i)})
    writer.flush(block_until_num_items=0, timeout_ms=60_000)
    writer.end_episode(clear_buffers=True)
    sizes = {name: info.current_size for name, info in client.server_info().items()}
    assert sizes == {"t": 3, "u": 1} and not writer.step_is_open
    sample = next(client.sample("u", emit_timesteps=False))
    assert plain(sample) == [4] and sample.info.priority == 2.0
