"""How a machine is divided, and that a slot holds what runs in it."""

import os
import subprocess
import sys

import pytest
from background import Background

from framework.experiments import slots
from framework.experiments.slots import Slot, make_slots
from launch import platforms


@pytest.mark.parametrize(
    ("cores", "devices", "count", "expected"),
    [
        ([0, 1, 2, 3], "0,1", 2, [((0, 1), ("0",)), ((2, 3), ("1",))]),
        ([4, 6, 7], "GPU-a,GPU-b,GPU-c", 2, [((4,), ("GPU-a",)), ((6, 7), ("GPU-b", "GPU-c"))]),
        ([0, 1], "3", 3, [((0,), ("3",)), ((1,), ("3",)), ((0,), ("3",))]),  # Several share one.
        ([5], "", 1, [((5,), ())]),
    ],
)
def test_shares(monkeypatch, cores, devices, count, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert make_slots(count) == [Slot(*each) for each in expected]


def test_all_gpus_are_seen_where_no_variable_chooses(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [slot.devices for slot in make_slots(2)] == [("0",), ("1",)]


def test_without_affinities_slots_have_no_cores(monkeypatch):
    monkeypatch.setenv("REPERTORY_PLATFORM_WITHOUT", "affinity")
    assert [slot.cores for slot in make_slots(2)] == [(), ()]


@pytest.mark.parametrize(
    ("cores", "given", "threads"),
    [((0,), None, "1"), ((0,), "3", "3"), ((0, 1), None, None), ((), None, "1")],
)
def test_variables(monkeypatch, cores, given, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    made = Slot(cores, ("2", "5")).variables()
    assert made.pop("CUDA_VISIBLE_DEVICES") == "2,5" and made.get("OMP_NUM_THREADS") == threads


@pytest.mark.skipif(not platforms.has("affinity"), reason="this system binds no process")
def test_what_the_thread_of_a_slot_starts_is_bound_and_the_others_are_not():
    before = os.sched_getaffinity(0)
    core = max(before)

    def child():
        Slot((core,), ()).bind()
        code = "import os; print(*os.sched_getaffinity(0))"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert Background(child).result() == f"{core}\n"
    assert os.sched_getaffinity(0) == before and slots.platforms.num_cores() == len(before)
