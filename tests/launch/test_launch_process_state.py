"""A program in the caller's process gives back what it sets, and finds there what it left."""

from __future__ import annotations

import contextlib
import random

import callers
import numpy as np
import pytest
import torch

import launch as lp

ENDS = {"normally": None, "by an error": ValueError("of a node"), "by an interrupt": KeyboardInterrupt()}


def draw():
    return random.random(), float(np.random.rand()), torch.rand((), device="cpu").item()


class Drawing:
    """Sets what it can in the constructor, and draws a number of each generator at each step."""

    def __init__(self, end):
        self._end, self._drawn = end, []
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float16)
        np.seterr(all="ignore")

    def step(self):
        if lp.get_node_context().engine == "serial":  # Threads share the generators with the caller.
            self._drawn.append(draw())
        self.settings = callers.settings()
        if len(self._drawn) == 5 or lp.get_node_context().engine == "threads":
            if self._end is not None:
                raise self._end
            lp.stop((self._drawn, callers.settings()))

    def run(self):
        while not lp.stop_event().is_set():
            self.step()


def drawing(end=None, seed=3):
    program = lp.Program("drawing")
    program.seed = seed
    program.add_node(lp.PyClassNode(Drawing, end), label="worker")
    return program


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize("end", ENDS)
def test_the_caller_gets_its_process_back(engine, end):
    with callers.unusual_settings():
        before = callers.generators(), callers.settings()
        with contextlib.nullcontext() if ENDS[end] is None else pytest.raises(BaseException):
            lp.launch(drawing(ENDS[end]), engine)
        assert (callers.generators(), callers.settings()) == before


def test_a_node_that_the_caller_calls_first_is_made_in_the_state_of_the_program():
    class Service:
        def __init__(self):
            torch.set_num_threads(2)

        def call(self):
            return None

    program = lp.Program("called")
    program.add_node(lp.CourierNode(Service), label="service")
    program.add_node(lp.PyNode(lambda: lp.stop(torch.get_num_threads())), label="main")
    job, before = lp.start(program, "serial"), callers.settings()
    job.client("service").call()
    assert callers.settings() == before
    assert job.wait() == 2


def test_the_last_program_on_threads_gives_the_settings_back():
    program = lp.Program("waits")
    program.add_node(lp.PyNode(lambda: (torch.set_num_threads(2), lp.wait_for_stop())), label="main")
    before = callers.settings()
    first, second = lp.start(program, "threads"), lp.start(drawing(), "threads")
    second.wait()
    first.stop()
    first.wait()
    assert callers.settings() == before


def test_a_serial_program_draws_the_same_whatever_the_caller_draws_and_sets():
    expected, settings = lp.launch(drawing(), "serial")
    random.seed(7)
    callers_numbers = [random.random() for _ in range(4)]
    random.seed(7)
    job, drawn = lp.start(drawing(), "serial"), []
    with callers.unusual_settings():
        for _ in range(4):
            with pytest.raises(TimeoutError):
                job.wait(timeout=0.0)
            drawn.append(draw()[0])
        assert job.wait() == (expected, settings)
    assert drawn == callers_numbers
    # It begins as on a new thread, but for what it has set itself.
    _, own_threads, dtype, inference, gradients, device, _ = settings
    assert (own_threads, dtype, inference, gradients) == (2, torch.float16, False, True)
    assert device == torch.device("cpu")


def test_a_serial_program_without_a_seed_draws_from_the_callers_generators():
    random.seed(7)
    first, second = (lp.launch(drawing(seed=None), "serial")[0] for _ in range(2))
    random.seed(7)
    assert [numbers[0] for numbers in first + second] == [random.random() for _ in range(10)]
