"""An actor sends its rows while it steps."""

import random

import pytest
from helpers.node_clients import make_late_client
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.runs.services import Counter
from framework.workers.report import RowSender


class Notes:
    """A monitor and a checkpointer that note what arrives."""

    def __init__(self):
        self.notes = []

    def put(self, name, state):
        self.notes.append((name, "state", state["steps"]))

    def write(self, name, row):
        self.notes.append((name, "row", row))


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 8), order=st.randoms(use_true_random=False))
def test_rows_arrive_in_order_with_the_counts_of_the_program(rows, order):
    notes, counter = Notes(), Counter()
    late = make_late_client(notes, order)
    sender = RowSender("actor-0", "learner_steps", make_late_client(counter, order), late, late)
    for i in range(rows):
        sender.keep({"steps": i})
        assert [row["steps"] for _, kind, row in notes.notes if kind == "row"] == list(range(i))
        counter.increment(env_steps=100, learner_steps=10)
        sender.send({"steps": i, "env_steps": 7, "variables_version": 4})
    sender.wait()
    assert sorted(each[2] for each in notes.notes if each[1] == "state") == list(range(rows))
    assert [each for each in notes.notes if each[1] == "row"] == [
        ("actor-0", "row", {
            "steps": i, "env_steps": 100 * (i + 1) + 7, "variables_version": 4,
            "acting_staleness": 10 * (i + 1) - 4,
        })
        for i in range(rows)
    ]  # fmt: skip


@pytest.mark.parametrize("failing", ["put", "write"])
def test_an_error_ends_the_actor(failing):
    class Full(Notes):
        def put(self, name, state):
            if failing == "put":
                raise OSError("The disk is full.")

        def write(self, name, row):
            if failing == "write":
                raise OSError("The disk is full.")

    late = make_late_client(Full(), random.Random(0))
    sender = RowSender("actor-0", "learner_steps", make_late_client(Counter(), random.Random(0)), late, late)
    sender.keep({"steps": 1})
    sender.send({"steps": 1, "env_steps": 1})
    with pytest.raises(OSError, match="The disk is full"):
        sender.wait()


def test_without_parameters_and_checkpoints():
    notes = Notes()
    order = random.Random(0)
    client = make_late_client(notes, order)
    sender = RowSender("actor-0", "learner_steps", make_late_client(Counter(), order), client)
    sender.keep({"steps": 1})
    sender.send({"steps": 1, "env_steps": 1})
    sender.wait()
    assert notes.notes == [("actor-0", "row", {"steps": 1, "env_steps": 1})]
