"""Shared memory: clean errors when it is full, nothing left behind by servers that were killed."""

import os
import subprocess
import sys

import numpy as np
import pytest

from framework.replay import shm
from framework.replay.errors import StoreFullError
from framework.replay.rows.store import RowStore
from launch import directories

F4 = np.dtype(np.float32)
I8 = np.dtype(np.int64)


def test_two_mappings_see_the_same_rows(tmp_path):
    memory = shm.SharedMemory(str(tmp_path))
    array = memory.allocate("steps", "x", (1000, 3), F4)
    memory.reserve("steps", "x", 0, 120)
    other = shm.attach(memory.path("steps", "x"), (1000, 3), F4)
    array[7] = [1, 2, 3]
    other[8] = [4, 5, 6]
    np.testing.assert_array_equal(other[7], [1, 2, 3])
    np.testing.assert_array_equal(array[8], [4, 5, 6])
    memory.close()
    np.testing.assert_array_equal(other[7], [1, 2, 3])  # a mapping outlives its file


def test_virtual_size_costs_nothing_and_pages_come_in_steps(tmp_path):
    memory = shm.SharedMemory(str(tmp_path))
    store = RowStore(allocator=memory, capacity=10**6)
    stream = store.stream("steps", {"x": ((4, 84, 84), np.uint8)})  # 28 GB of address space
    path = memory.path("steps", "x")
    assert os.stat(path).st_blocks == 0
    stream.write("x", stream.lease(300), np.ones((300, 4, 84, 84), np.uint8))
    taken = os.stat(path).st_blocks * 512
    assert 300 * 28_224 <= taken <= 1000 * 28_224
    memory.close()


def test_a_full_tmpfs_is_a_clean_error_and_changes_nothing(tmp_path, monkeypatch):
    def full(file, offset, size):
        raise OSError(28, "No space left on device")

    memory = shm.SharedMemory(str(tmp_path))
    stream = RowStore(allocator=memory, capacity=1000).stream("steps", {"x": ((1000,), np.uint8)})
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreFullError, match=r"shared memory is full: \d+ more bytes are needed"):
        stream.lease(10)
    monkeypatch.undo()
    assert len(stream.lease(10)) == 10
    memory.close()


def _own(pipe, root):
    memory = shm.SharedMemory(root=root)
    memory.allocate("steps", "x", (10,), I8)
    pipe.send(memory.directory)
    pipe.recv()


def test_a_killed_owner_is_cleaned_up_by_the_next_and_a_live_one_is_not(tmp_path, fork):
    dead, live = (fork(_own, str(tmp_path)) for _ in range(2))
    folders = [child.word() for child in (dead, live)]
    dead.kill()
    assert all(map(os.path.isdir, folders))
    memory = shm.SharedMemory(str(tmp_path))
    assert [os.path.isdir(each) for each in (*folders, memory.directory)] == [False, True, True]
    assert directories.remove_abandoned_directories(str(tmp_path), shm.PREFIX) == []
    memory.close()


def test_an_interpreter_that_ends_without_close_leaves_nothing_and_says_nothing(tmp_path):
    code = """
import sys
import numpy as np
from framework.replay import shm
memory = shm.SharedMemory(root=sys.argv[1])
memory.allocate("steps", "x", (10,), np.dtype(np.int64))
print(memory.directory)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert child.stderr == "" and not os.path.exists(child.stdout.strip())


def test_attach_to_a_file_that_is_too_small(tmp_path):
    memory = shm.SharedMemory(str(tmp_path))
    memory.allocate("steps", "x", (10,), I8)
    with pytest.raises(ValueError, match="80 bytes, expected 88"):
        shm.attach(memory.path("steps", "x"), (11,), I8)
    memory.close()


def test_wide_rows_have_fewer_addresses_and_narrow_ones_all(tmp_path):
    store = RowStore(allocator=shm.SharedMemory(str(tmp_path)))
    wide, _ = store.claim("s", {"image": ((3, 1080, 1920), np.uint8), "n": ((), I8)})
    narrow, _ = store.claim("s", {"n": ((), F4)})
    assert (wide.name, narrow.name) == ("s", "s~2")
    assert wide.capacity * 3 * 1080 * 1920 <= 1 << 42
    assert wide.capacity > 500_000 and narrow.capacity == store.capacity
    stream, rows = wide, wide.lease(2)
    stream.write("image", rows, np.ones((2, 3, 1080, 1920), np.uint8))
    image = stream.columns["image"]
    other = shm.attach(store.allocator.path("s", "image"), image.shape, image.dtype)
    assert other[int(rows[1]), 2, -1, -1] == 1
    with pytest.raises(StoreFullError, match="first append"):  # for which there are too many rows already
        store.claim("s~2", {"image": ((3, 1080, 1920), np.uint8)}, "s~2")
    store.close()


def test_arrays_of_many_shapes_find_a_stream_each(tmp_path):
    store = RowStore(allocator=shm.SharedMemory(str(tmp_path)))
    for length in range(7200, 7400):  # With 4 TiB for each, the 72nd found no addresses.
        stream, _ = store.claim("s", {"x": ((length,), F4)})
        stream.write("x", stream.lease(1), np.ones((1, length), np.float32))
    assert len(store.streams) == 200
    assert store.num_bytes < 200 * (2 << 20)
    store.close()
