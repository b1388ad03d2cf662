"""Shared memory: growing steps, clean errors when it is full, nothing left behind by servers that were killed."""

import os
import subprocess
import sys

import numpy as np
import pytest

from framework.replay import shm


def make(tmp_path, **kwargs):
    return shm.SharedMemory(root=str(tmp_path), **kwargs)


def test_two_mappings_see_the_same_rows(tmp_path):
    memory = make(tmp_path)
    column = memory.column(1000, (3,), np.float32)
    column.reserve(10)
    other = shm.attach(column.path, 1000, (3,), np.float32)
    column.array[7] = [1, 2, 3]
    other[8] = [4, 5, 6]
    np.testing.assert_array_equal(other[7], [1, 2, 3])
    np.testing.assert_array_equal(column.array[8], [4, 5, 6])
    memory.close()
    np.testing.assert_array_equal(other[7], [1, 2, 3])  # a mapping outlives its file


def test_virtual_size_costs_nothing_and_pages_come_in_steps(tmp_path):
    memory = make(tmp_path)
    column = memory.column(10**7, (4, 84, 84), np.uint8)  # 282 GB of address space
    assert memory.used_bytes == 0
    column.reserve(1)
    assert memory.used_bytes == 1 << 20
    reserved = []
    for rows in range(1, 2000, 100):
        column.reserve(rows)
        assert column.reserved_rows >= rows
        reserved.append(column.reserved_bytes)
    assert len(set(reserved)) < len(reserved)  # not every call takes memory
    assert reserved[-1] <= 1.25 * 1901 * 4 * 84 * 84 + (1 << 20)
    assert os.stat(column.path).st_blocks * 512 == pytest.approx(reserved[-1], rel=0.01)
    memory.close()


def test_budget_is_a_clean_error_and_changes_nothing(tmp_path):
    memory = make(tmp_path, max_bytes=100_000)
    column = memory.column(1000, (1000,), np.uint8)
    column.reserve(90)
    with pytest.raises(MemoryError, match=r"needs \d+ more bytes.*max_bytes=100000"):
        column.reserve(101)
    assert column.reserved_rows == 100 or column.reserved_rows == 90
    column.reserve(100)
    assert memory.used_bytes <= 100_000
    memory.close()


def test_full_tmpfs_is_a_clean_error(tmp_path, monkeypatch):
    def full(file, offset, size):
        raise OSError(28, "No space left on device")

    memory = make(tmp_path)
    column = memory.column(1000, (1000,), np.uint8)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        MemoryError, match=r"shared memory is full: 10000 more bytes are needed and \d+ are free"
    ):
        column.reserve(10)
    assert column.reserved_bytes == 0 and memory.used_bytes == 0
    monkeypatch.undo()
    column.reserve(10)
    memory.close()


def test_nearly_full_tmpfs_gives_what_is_needed_now(tmp_path, monkeypatch):
    def nearly_full(file, offset, size):
        if size > 20_000:
            raise OSError(28, "No space left on device")

    memory = make(tmp_path)
    column = memory.column(1000, (1000,), np.uint8)
    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    column.reserve(20)
    assert column.reserved_bytes == memory.used_bytes == 20_000
    memory.close()


def test_rows_beyond_the_capacity_are_refused(tmp_path):
    memory = make(tmp_path)
    with pytest.raises(MemoryError, match="capacity is 10"):
        memory.column(10, (), np.int64).reserve(11)
    memory.close()


def test_close_removes_the_directory(tmp_path):
    memory = make(tmp_path)
    memory.column(10, (), np.int64).reserve(5)
    assert os.listdir(tmp_path)
    assert os.stat(memory.directory).st_mode & 0o777 == 0o700
    memory.close()
    assert os.listdir(tmp_path) == []


CHILD = """
import sys
import numpy as np
from framework.replay import shm
memory = shm.SharedMemory(root=sys.argv[1])
memory.column(10, (), np.int64).reserve(5)
print(memory.directory, flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


def start(tmp_path, what):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return child, child.stdout.readline().strip()


def test_a_killed_owner_is_cleaned_up_by_the_next_and_a_live_one_is_not(tmp_path):
    dead, dead_directory = start(tmp_path, "wait")
    live, live_directory = start(tmp_path, "wait")
    try:
        dead.kill()
        dead.wait(10)
        assert os.path.isdir(dead_directory) and os.path.isdir(live_directory)
        memory = make(tmp_path)
        assert not os.path.exists(dead_directory)
        assert os.path.isdir(live_directory) and os.path.isdir(memory.directory)
        assert shm.remove_stale(str(tmp_path)) == []
        memory.close()
    finally:
        for child in (dead, live):
            child.kill()
            child.communicate(timeout=10)


def test_an_interpreter_that_ends_without_close_leaves_nothing_and_says_nothing(tmp_path):
    child, directory = start(tmp_path, "end")
    _, noise = child.communicate(timeout=20)
    assert child.returncode == 0 and noise == ""
    assert not os.path.exists(directory)


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "repertory-notes.txt").write_text("mine")
    make(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == ["notes", "repertory-notes.txt"]


def test_attach_to_a_file_that_is_too_small(tmp_path):
    memory = make(tmp_path)
    column = memory.column(10, (), np.int64)
    with pytest.raises(ValueError, match="80 bytes, 88 expected"):
        shm.attach(column.path, 11, (), np.int64)
    memory.close()
