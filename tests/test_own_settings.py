"""The settings of torch and NumPy with which the library computes, and what it leaves of the caller's."""

from __future__ import annotations

import callers
import pytest
import torch

from framework import own_settings
from framework.own_settings import OwnSettings, in_own_settings, seeded
from framework.workers.worker import prepare_process
from launch import context
from launch.context import NodeContext


@pytest.fixture
def node_of(monkeypatch):
    """Puts this thread into a node of an engine, or into none."""

    def enter(engine):
        node = NodeContext("program", "learner", 0, "learner-0", engine, None, "job")
        monkeypatch.setattr(context.here, "context", node if engine else None)

    return enter


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(own_settings, "_CORES", 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "engine, before, parameters, given, variable, threads",
    [
        ("serial", 1, 10**6, None, None, 8),
        ("serial", 1, 160_000, None, None, 3),
        ("serial", 8, 99_000, None, None, 1),
        ("serial", 1, 10**6, None, "3", 3),
        ("serial", 1, 10**4, 2, None, 2),
        (None, 8, 160_000, None, None, 3),
        (None, 8, 10**4, None, None, 1),
        (None, 2, 10**6, None, None, 2),  # The caller has chosen fewer.
        (None, 8, 10**4, None, "3", 3),
        ("processes", 1, 10**6, None, None, 1),
        ("processes", 3, 10**6, None, "3", 3),
        ("processes", 3, 10**4, 2, "3", 2),
        ("threads", 1, 10**6, None, None, 1),
        ("threads", 1, 10**4, 2, None, 2),
    ],
)
def test_threads_follow_from_the_networks(
    monkeypatch, node_of, engine, before, parameters, given, variable, threads
):
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    node_of(engine)
    torch.set_num_threads(before)
    with OwnSettings([torch.empty(parameters, device="meta")], given):
        assert torch.get_num_threads() == threads
        with OwnSettings(threads=5):  # The outermost block decides.
            assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before


def test_the_callers_settings_come_back_after_an_error():
    class Object:
        settings = OwnSettings()

        @in_own_settings
        def fail(self):
            assert torch.zeros(()).dtype == torch.float32 and torch.is_grad_enabled()
            raise ZeroDivisionError

    with callers.unusual_settings():
        before = callers.settings()
        with pytest.raises(ZeroDivisionError):
            Object().fail()
        assert callers.settings() == before


def test_an_interrupt_of_the_beginning_leaves_the_callers_settings(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    torch.set_num_threads(8)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(own_settings, "_are_usual", interrupt)
        OwnSettings().__enter__()
    assert torch.get_num_threads() == 8
    with OwnSettings():
        assert torch.get_num_threads() == 1


def test_initial_parameters_leave_the_generators():
    before = callers.generators()
    with seeded(3):
        drawn = torch.rand(2)
    assert callers.generators() == before
    assert drawn.equal(torch.rand(2, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_node_on_a_thread_leaves_the_callers_generators(node_of, engine):
    before = callers.generators()
    node_of(engine)
    prepare_process(3)
    assert (callers.generators() == before) == (engine == "threads")
    assert torch.get_num_threads() == 1
