"""The block of parameters: whole versions only, versions that grow, in this process and in others."""

import errno
import multiprocessing
import os
import pickle
import threading

import numpy as np
import pytest
from background import Background, until
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.replay.errors import StoreFullError
from framework.variables import VariableBlock, copy_variables

DTYPES = [np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_]


def filled(value, size=1000):
    return {
        "body": {"weight": np.full((size, 3), value, np.float32), "count": np.array(value)},
        "head": {"bias": np.full(size, value, np.float32)},
    }


def empty_like(parameters):
    return {name: {k: np.empty_like(a) for k, a in state.items()} for name, state in parameters.items()}


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=6
    ),
    versions=st.lists(st.integers(0, 10**12), min_size=1, max_size=5, unique=True).map(sorted),
)
@settings(deadline=None, max_examples=50)
def test_what_is_read_is_what_was_published_last(shapes, versions):
    generator = np.random.default_rng(len(shapes))
    block = published = None
    for version in versions:
        leaves = [np.asarray(generator.random(shape) * 100).astype(dtype) for dtype, shape in shapes]
        published = {"a": {str(i): leaf for i, leaf in enumerate(leaves)}}
        block = block or VariableBlock(published)
        block.publish(version, published, env_steps=version + 1)
    into = empty_like(published)
    assert block.read(into) == (versions[-1], versions[-1] + 1)
    for key, array in published["a"].items():
        assert into["a"][key].dtype == array.dtype and np.array_equal(into["a"][key], array)
    assert block.read(into, newer_than=versions[-1]) is None


def test_nothing_is_there_before_the_first_publication():
    block = VariableBlock(filled(0))
    assert block.version == -1 and block.read(empty_like(filled(0))) is None and block.get_variables() is None
    waiting = Background(block.get_variables, (), -1, 3600.0)
    until(lambda: block.changed._waiters)
    block.publish(0, filled(0))
    assert waiting.result().version == 0, "a publication wakes those who wait"


def test_versions_only_grow():
    block = VariableBlock(filled(0))
    block.publish(4, filled(4))
    with pytest.raises(ValueError, match="version: got 4, expected more than 4"):
        block.publish(4, filled(5))
    assert block.version == 4


def test_variables_travel_in_numpy_and_stay_what_they_were():
    block = VariableBlock(filled(0))
    block.publish(1, filled(1), env_steps=20)
    variables = block.get_variables(["head"], newer_than=0)
    for version in (2, 3):
        block.publish(version, filled(version))
    assert (variables.version, variables.env_steps, list(variables.values)) == (1, 20, ["head"])
    np.testing.assert_array_equal(variables.values["head"]["bias"], np.full(1000, 1.0, np.float32))
    assert block.get_variables(newer_than=3) is None
    with pytest.raises(KeyError, match=r"got \['critic'\], expected some of \['body', 'head'\]"):
        block.get_variables(["critic"])


def test_a_block_in_private_memory_does_not_reach_another_process():
    assert pickle.loads(pickle.dumps(VariableBlock(filled(0)))) is None


def test_a_block_whose_file_is_elsewhere_is_not_reached(tmp_path):
    data = pickle.dumps(VariableBlock(filled(0), str(tmp_path / "block")))
    (tmp_path / "block").unlink()
    assert pickle.loads(data) is None


def test_a_new_writer_goes_on_in_the_same_file(tmp_path):
    path = str(tmp_path / "block")
    first = VariableBlock(filled(0), path)
    reader = pickle.loads(pickle.dumps(first))
    first.publish(7, filled(7))
    first._header[0] += 1  # killed in the middle of the next publication
    for array in first._slots[0]["body"].values():
        array.fill(99)
    into = empty_like(filled(0))
    assert reader.read(into).version == 7 and into["body"]["count"] == 7
    second = VariableBlock(filled(0), path)
    assert second.version == 7
    second.publish(8, filled(8))
    assert reader.read(into, newer_than=7).version == 8 and into["head"]["bias"][0] == 8


def test_a_new_writer_goes_on_where_memory_cannot_be_reserved(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    VariableBlock(filled(0), str(tmp_path / "block")).publish(7, filled(7))
    into = empty_like(filled(0))
    assert VariableBlock(filled(0), str(tmp_path / "block")).read(into).version == 7
    assert into["head"]["bias"][0] == 7


def test_full_shared_memory_says_how_much_is_missing(tmp_path, monkeypatch):
    def full(file, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreFullError, match=r"32\d+ more bytes.*block.*shm-size"):
        VariableBlock(filled(0), str(tmp_path / "block"))


def test_a_read_in_which_its_slot_is_written_is_made_again(monkeypatch):
    """While the first publication is copied, the next one is made, and the one after that dies half-way."""
    block, into = VariableBlock(filled(0)), empty_like(filled(0))
    block.publish(1, filled(1), env_steps=10)
    copies = iter(["read 1", "publish 2", "publish 3", "read 2"])

    def copy(source, targets):
        name = next(copies)
        if name == "read 1":
            copy_variables(source, {"head": targets["head"]})
            block.publish(2, filled(2), env_steps=20)
            with pytest.raises(KeyboardInterrupt):
                block.publish(3, filled(3), env_steps=30)
            copy_variables(source, {"body": targets["body"]})
        elif name == "publish 3":
            copy_variables(source, {"body": targets["body"]})
            raise KeyboardInterrupt
        else:
            copy_variables(source, targets)

    monkeypatch.setattr("framework.variables.copy_variables", copy)
    assert block.read(into) == (2, 20) and block.version == 2 and not list(copies)
    assert all(np.all(array == 2) for state in into.values() for array in state.values())


def publish_until(stop, block, ready):
    version = 1
    while not stop.is_set():
        block.publish(version, filled(version), env_steps=2 * version)
        version += 1
        ready.set()


@pytest.mark.parametrize("where", ["thread", "process"])
def test_no_reader_sees_parts_of_two_versions(where, tmp_path):
    path = str(tmp_path / "block") if where == "process" else None
    block = VariableBlock(filled(0), path)
    context = multiprocessing.get_context("fork")
    make = threading if where == "thread" else context
    stop, ready = make.Event(), make.Event()
    start = threading.Thread if where == "thread" else context.Process
    writer = start(target=publish_until, args=(stop, block, ready))
    writer.start()
    try:
        assert ready.wait(60)
        into, seen = empty_like(filled(0)), []
        while len(seen) < 200:
            progress = block.read(into, seen[-1] if seen else -1)
            if progress is None:
                continue
            for array in (*into["body"].values(), *into["head"].values()):
                assert np.all(array == progress.version)
            assert progress.env_steps == 2 * progress.version
            seen.append(progress.version)
    finally:
        stop.set()
        writer.join(60)
    assert seen == sorted(set(seen))
