"""The live table of a program's nodes."""

import io
import math

import pytest
from rich.console import Console

import launch as lp
from launch.texts import rounded
from launch.view import NodesView, nodes_table


def reading(time, *nodes, state="running"):
    return {"program": "dqn", "engine": "processes", "state": state, "time": time, "nodes": list(nodes)}


def node(label, calls, pid=7, **changes):
    usage = {"cpu_seconds": calls / 100, "memory_bytes": 250e6, "calls": calls, "error": None}
    return {"label": label, "state": "running", "restarts": 0, "pid": pid, **usage, **changes}


def text(table):
    console = Console(file=io.StringIO(), width=150)
    console.print(table)
    return console.file.getvalue()


def rows(table):
    """Each line as the words between its bars."""
    lines = [line for line in text(table).splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


NOTHING = {"cpu_seconds": None, "memory_bytes": None, "calls": None}
DIED = "ProcessDied: the process was killed by SIGKILL"
TABLES = {
    "rates are the difference of two readings": (
        reading(100.0, node("learner-0", 50)),
        reading(102.0, node("learner-0", 150)),
        ["learner-0", "running", "0", "50", "250", "50", ""],
    ),
    "slow rates are not 0": (
        reading(100.0, node("learner-0", 50)),
        reading(104.0, node("learner-0", 51)),
        ["learner-0", "running", "0", "0.25", "250", "0.25", ""],
    ),
    "a new life has no rates yet": (
        reading(100.0, node("actor-0", 50)),
        reading(101.0, node("actor-0", 5, pid=8, restarts=1, error=DIED)),
        ["actor-0", "running", "1", "", "250", "", DIED],
    ),
    "without numbers there are none": (
        {},
        reading(1.0, {**node("main-0", 0, state="starting"), **NOTHING}),
        ["main-0", "starting", "0", "", "", "", ""],
    ),
}


@pytest.mark.parametrize("before, now, row", TABLES.values(), ids=TABLES.keys())
def test_table(before, now, row):
    assert rows(nodes_table(now, before)) == [row]


def test_numbers_show_two_digits_or_their_decimals():
    shown = {
        30510.4: "30,510",
        42.3: "42",
        5.04: "5.0",
        0.996: "1.00",
        0.004: "0.0040",
        -0.43: "-0.43",
        0: "0",
    }
    assert {number: rounded(number) for number in shown} == shown
    assert [rounded(each, 1) for each in (475, 2899.55, 0, math.nan, 1e-12)] == [
        "475.0",
        "2,899.6",
        "0.0",
        "nan",
        "1e-12",
    ]


def test_rates_do_not_suffer_from_looking_more_often_than_the_interval():
    statuses = [reading(100, node("a-0", 0)), reading(101, node("a-0", 10)), reading(101.1, node("a-0", 90))]
    view = NodesView(iter(statuses).__next__)
    assert rows(view())[0][5] == ""
    assert rows(view())[0][5] == "10"
    assert rows(view())[0][5] == "10"  # a tenth of a second later


def test_a_file_that_has_not_changed_keeps_its_rates_and_no_file_shows_what_there_was():
    same = reading(101.0, node("a-0", 10))
    statuses = [reading(100.0, node("a-0", 0)), same, same, {}]
    view = NodesView(iter(statuses).__next__, interval=0.0)
    assert [rows(view())[0][5] for _ in statuses] == ["", "10", "10", "10"]


def test_the_end_is_shown_at_once():
    ends = reading(101.2, node("a-0", 11, state="closed"), state="finished")
    statuses = [reading(100.0, node("a-0", 0)), reading(101.0, node("a-0", 10)), ends]
    view = NodesView(iter(statuses).__next__)
    *_, last = (view() for _ in statuses)
    assert "finished" in text(last) and "closed" in text(last)


def test_nothing_yet():
    assert rows(NodesView(dict)()) == []


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_job(engine):
    program = lp.Program("viewed")
    program.add_node(lp.PyNode(lp.stop, 1), label="main")
    with lp.start(program, engine) as job:
        view = NodesView(job.status)
        assert rows(view())[0][0] == "main-0"
        assert job.wait(timeout=60) == 1
    assert f"viewed on {engine}: finished" in text(view())
