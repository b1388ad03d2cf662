"""Loggers: rows come out as they went in, late columns included, and nothing is dropped."""

import csv as csv_module
import errno
import io
import json
import math
import os
import resource

import numpy as np
import pytest

from framework import loggers
from framework.loggers import files


class Clock:
    """A clock whose time the test sets."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def rows_of_csv(path):
    with open(path, newline="") as file:
        return list(csv_module.DictReader(file))


ROWS = {
    "one row": [{"a": 1}],
    "late column": [{"a": 1}, {"a": 2, "b": 0.5}, {"b": 1.5}],
    "disjoint": [{"a": 1}, {"b": 2}, {"c": 3}, {"a": 4}],
    "text and bool": [{"label": "learner", "done": True, "none": None}, {"label": 'a,"b"\n', "done": False}],
    "ends of lines": [{"a": "one\rtwo"}, {"a": "three\r", "b": "\r\n"}],
    "unicode": [{"näme": "wért"}],
}


MAKERS = {"jsonl": loggers.JSONLLogger, "csv": loggers.CSVLogger}


@pytest.mark.parametrize("again", [False, True], ids=["at once", "each row by another logger"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_every_row_and_column_is_kept(tmp_path, rows, make, again):
    path = tmp_path / "new" / "metrics"
    for part in [[row] for row in rows] if again else [rows]:
        with make(path) as log:
            for row in part:
                log.write(row)
    if make is loggers.JSONLLogger:
        assert list(loggers.read_jsonl(path)) == rows
    else:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        assert rows_of_csv(path) == [
            {name: "" if row.get(name) is None else str(row[name]) for name in columns} for row in rows
        ]
    assert os.listdir(path.parent) == ["metrics"]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_row_is_in_the_file_when_write_returns(tmp_path, make):
    log = make(tmp_path / "metrics")
    log.write({"a": 12345})
    assert "12345" in (tmp_path / "metrics").read_text()
    log.close()
    log.close()
    with pytest.raises(ValueError, match="after close"):
        log.write({"a": 1})


@pytest.mark.parametrize("lost", ['{"a": 2, "b', "2\n"], ids=["a cut last line", "no row"])
def test_a_line_that_is_no_row_costs_only_itself(tmp_path, lost):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n' + lost)
    with loggers.JSONLLogger(path) as log:
        log.write({"a": 3})
    with pytest.warns(UserWarning, match=r"m\.jsonl:2"):
        assert list(loggers.read_jsonl(path)) == [{"a": 1}, {"a": 3}]


def test_a_table_that_ends_within_quotes_is_continued(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text('step,text\n1,ok\n2,"hal')
    for row in ({"step": 3, "text": "x"}, {"step": 4, "new": 5}):
        with loggers.CSVLogger(path) as log:
            log.write(row)
    expected = [["1", "ok", ""], ["2", "hal\n", ""], ["3", "x", ""], ["4", "", "5"]]
    assert [[*row.values()] for row in rows_of_csv(path)] == expected


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_text_that_is_not_utf_8_costs_no_row(tmp_path, make):
    with make(tmp_path / "metrics") as log:
        log.write({"a": "x\udcff"})
    assert "x\\udcff" in (tmp_path / "metrics").read_text(encoding="utf-8")


def test_not_finite_numbers_are_json_and_come_back(tmp_path):
    path = tmp_path / "m.jsonl"
    with loggers.JSONLLogger(path) as log:
        log.write({"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (row,) = loggers.read_jsonl(path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_scalars_become_plain():
    torch = pytest.importorskip("torch")
    row = {"float32": np.float32(0.5), "int64": np.int64(3), "array": np.array(2.5), "bool": np.bool_(True)}
    row |= {"python": 7, "string": "x", "tensor": torch.tensor(1.5), "integers": torch.tensor(2)}
    plain = loggers.to_scalars({**row, "gradient": torch.tensor(1.0, requires_grad=True)})
    assert list(map(repr, plain.values())) == ["0.5", "3", "2.5", "True", "7", "'x'", "1.5", "2", "1.0"]


@pytest.mark.parametrize(
    "value", [np.zeros(3), [1, 2], {"x": 1}, np.zeros(0)], ids=["array", "list", "dict", "empty"]
)
def test_what_is_no_scalar_is_named(value):
    with pytest.raises(ValueError, match=r"'td_error'.*expected a scalar"):
        loggers.to_scalars({"fine": 1, "td_error": value})


def test_times_are_apart():
    assert loggers.without_times({"a": 1, "time/x": 2.0, "timely": 3}) == {"a": 1, "timely": 3}


def test_terminal_format():
    lines = []
    log = loggers.TerminalLogger("Test", lines.append)
    log.write({"A": 1337, "B": 42.0, "C": "foo", "D": 1.25e-5, "E": math.nan})
    assert lines == ["[Test] A = 1337 | B = 42.000 | C = foo | D = 1.25e-05 | E = nan"]
    loggers.TerminalLogger("", lines.append).write({"A": 1})
    assert lines[1] == "A = 1"


def test_dispatcher_closes_all_even_if_one_fails():
    failing, last, closed = loggers.InMemoryLogger(), loggers.InMemoryLogger(), []
    failing.close, last.close = lambda: 1 / 0, lambda: closed.append(True)
    both = loggers.Dispatcher([failing, last])
    both.write({"a": np.float32(1)})
    with pytest.raises(ZeroDivisionError):
        both.close()
    assert closed and last.rows == [{"a": 1.0}]


def test_a_logger_of_a_user_changes_no_row_of_others_and_ends_nothing(caplog):
    class Spoils(loggers.InMemoryLogger):
        def write(self, row):
            row.clear()

        def close(self):
            raise OSError("no network")

    other = loggers.InMemoryLogger()
    with loggers.Dispatcher([Spoils(), other]) as both:
        both.write({"a": 1})
    assert other.rows == [{"a": 1}]
    assert "logger Spoils: close() raised OSError: no network" in caplog.text


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_rows_before_a_full_disk_are_intact(tmp_path, make):
    path = tmp_path / "metrics"
    log = make(path)
    log.write({"text": "x" * 100})
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
    try:
        with pytest.raises(OSError, match="size limit"):
            log.write({"text": "y" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    log.write({"text": "z"})
    log.close()
    assert path.read_bytes().startswith(before) and path.read_text().count("\n") == before.count(b"\n") + 1


def test_csv_that_cannot_be_widened_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "m.csv"
    log = loggers.CSVLogger(path)
    log.write({"a": 1})
    before = path.read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        log.write({"a": 2, "b": 3})
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.csv"]
    log.write({"a": 4})
    log.close()
    assert rows_of_csv(path) == [{"a": "1"}, {"a": "4"}]


def test_tensorboard_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with loggers.TensorBoardLogger(tmp_path) as log:
        log.write({"label": "learner", "env_steps": 50, "steps": 7, "loss": 0.5, "note": "text"})
        log.write({"label": "actor-0", "episode_return": 3.0})
        log.write({"label": "actor-0", "episode_return": 5.0})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("learner/loss")] == [(50, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("actor-0/episode_return")] == [(0, 3.0), (1, 5.0)]
    assert "learner/note" not in events.Tags()["scalars"]


class TestProgress:
    SNAPSHOT = {
        "counts": {"env_steps": 500, "learner_steps": 250},
        "labels": {
            "actor-0": {"episode_return": 20.0},
            "actor-1": {"episode_return": 40.0},
            "learner": {"loss": 0.5, "replay/samples_per_insert": 8.0},
            "evaluator": {"episode_return": 123.0, "env_steps": 400},
        },
    }

    def display(self, terminal=False, **kwargs):
        rich_console = pytest.importorskip("rich.console")
        out = io.StringIO()
        console = rich_console.Console(file=out, force_terminal=terminal, width=100)
        clock = Clock()
        display = loggers.ProgressDisplay(1000, 475.0, console=console, clock=clock, **kwargs)
        return display, clock, out

    def test_numbers(self):
        display, clock, _ = self.display()
        display.update({"counts": {"env_steps": 100, "learner_steps": 50}, "labels": {}})
        clock.now += 4.0
        display.update(self.SNAPSHOT)
        assert display.numbers() == {
            "env steps": "500 / 1,000",
            "env steps/s": "100",
            "learner steps": "250",
            "learner steps/s": "50",
            "return, acting": "30.0",
            "return, greedy": "123.0 (goal 475) at step 400",
            "samples per insert": "8.00",
            "loss": "0.500",
            "time to go": "0:00:05",
        }

    def test_rates_of_rare_steps_are_not_0(self):
        display, clock, _ = self.display()
        shown = {}
        for second in range(200):  # A learner step each 25 seconds, and none after 60.
            learned = min(second, 60) // 25
            display.update({"counts": {"env_steps": 1_000 * second, "learner_steps": learned}})
            shown[second] = [display.numbers()[f"{name} steps/s"] for name in ("env", "learner")]
            clock.now += 1.0
        assert [shown[second] for second in (5, 30, 45, 199)] == [
            ["1,000", "0"],
            ["1,000", "0.10"],
            ["1,000", "0.048"],
            ["1,000", "0"],
        ]

    def test_lines_now_and_then_where_there_is_no_terminal(self):
        display, clock, out = self.display(line_every=10.0)
        display.update({"counts": {"env_steps": 0}, "labels": {}})
        assert out.getvalue() == ""  # still starting
        for steps in range(500, 525):
            display.update({**self.SNAPSHOT, "counts": {"env_steps": steps}})
            clock.now += 1.0
        assert out.getvalue().count("\n") == 3
        for _ in range(41):  # No line is repeated.
            display.update({**self.SNAPSHOT, "counts": {"env_steps": 524}})
            clock.now += 1.0
        display.close()
        display.close()
        lines = out.getvalue().splitlines()
        assert 4 <= len(lines) == len(set(lines)) <= 5 and lines[-1].startswith("env steps 524 / 1,000")

    def test_live_view_on_a_terminal(self):
        display, _, out = self.display(terminal=True)
        with display:
            display.update(self.SNAPSHOT)
        assert "123.0 (goal 475)" in out.getvalue()
        bars = [line for line in out.getvalue().splitlines() if "━" in line]
        assert bars and not any("env steps" in bar for bar in bars)  # a line of its own

    def test_first_snapshot_is_nearly_empty(self):
        display, _, _ = self.display()
        display.update({"counts": {}, "labels": {}})
        assert display.numbers()["time to go"] == "?"
