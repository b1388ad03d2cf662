"""``repertory status --watch``: the table of nodes."""

import io
import json

from rich.console import Console

from agents.commands import status


def reading(time, *nodes):
    return {"program": "dqn", "engine": "processes", "state": "running", "time": time, "nodes": list(nodes)}


def node(label, calls, pid=7, **changes):
    usage = {"cpu_seconds": calls / 100, "memory_bytes": 250e6, "calls": calls, "error": None}
    return {"label": label, "state": "running", "restarts": 0, "pid": pid, **usage, **changes}


def rows(table):
    """Each line as the words between its bars."""
    console = Console(file=io.StringIO(), width=150)
    console.print(table)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_rates_are_the_difference_of_two_readings():
    before = reading(100.0, node("learner-0", 50))
    now = reading(102.0, node("learner-0", 150))
    assert rows(status.nodes_table(now, before)) == [
        ["learner-0", "running", "0", "50", "250", "50", ""],
    ]


def test_a_new_life_has_no_rates_yet():
    before = reading(100.0, node("actor-0", 50))
    error = "ProcessDied: the process was killed by SIGKILL"
    now = reading(101.0, node("actor-0", 5, pid=8, restarts=1, error=error))
    assert rows(status.nodes_table(now, before)) == [
        ["actor-0", "running", "1", "", "250", "", error],
    ]


def test_without_numbers_there_are_none():
    nothing = {"cpu_seconds": None, "memory_bytes": None, "calls": None}
    bare = {**node("main-0", 0, state="starting"), **nothing}
    assert rows(status.nodes_table(reading(1.0, bare), {})) == [["main-0", "starting", "0", "", "", "", ""]]


def test_watching_a_run_that_has_ended_shows_it_once(repertory, make_run):
    folder = make_run()
    (folder.path / "status.json").write_text(json.dumps(reading(1.0, node("learner-0", 1))))
    code, out, _ = repertory("status", folder.path, "--watch")
    assert code == 0
    assert "learner-0" in out and "dqn on processes: running" in out


def test_restarts_are_counted_from_zero(repertory, tmp_path):
    code, _, err = repertory("train", "random_actions", "--restarts", "-1", "--directory", tmp_path / "run")
    assert code == 1 and "--restarts is -1" in err
    assert not (tmp_path / "run").exists()
