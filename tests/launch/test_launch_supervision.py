"""What the supervisor survives: files it cannot write, nodes that do not read, errors of its own."""

import contextlib
import json
import logging
import os
import shutil
import threading

import pytest

import launch as lp
from launch.engines import processes
from launch.engines.supervised.files import Files
from launch.engines.supervised.job import SupervisedJob

PATIENCE = 60.0


class Saver:
    """A worker that saves when it is closed."""

    def __init__(self, path):
        self._path = path

    def run(self):
        lp.wait_for_stop()

    def close(self):
        with open(self._path, "a") as file:
            file.write("saved\n")


def saving_program(path, count=1):
    program = lp.Program("saving")
    for _ in range(count):
        program.add_node(lp.CourierNode(Saver, path), label="saver")
    return program


def wait_until(job, holds):
    """Waits for a state of the nodes; the supervisor notifies of each turn."""
    with job.outcome.changed:
        assert job.outcome.changed.wait_for(lambda: job.over or holds(), PATIENCE)
    assert not job.over


def all_run(job):
    return all(node["state"] == "running" for node in job.nodes())


@pytest.fixture
def warnings():
    """The warnings of the launcher, each of which notifies the test."""

    class Warnings(logging.Handler):
        def __init__(self):
            super().__init__()
            self.changed = threading.Condition()
            self.texts = []

        def emit(self, record):
            with self.changed:
                self.texts.append(record.getMessage())
                self.changed.notify_all()

        def wait(self, word):
            with self.changed:
                assert self.changed.wait_for(lambda: any(word in text for text in self.texts), PATIENCE)

    handler = Warnings()
    logging.getLogger("launch").addHandler(handler)
    yield handler
    logging.getLogger("launch").removeHandler(handler)


# Files.


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_folder_that_goes_away_does_not_end_the_program(tmp_path, warnings, comes_back):
    folder, away, saved = tmp_path / "run", tmp_path / "away", tmp_path / "saved"
    with lp.start(saving_program(saved), "processes", directory=folder, stop_timeout=PATIENCE) as job:
        wait_until(job, lambda: all_run(job))
        if comes_back:
            os.rename(folder, away)
        else:
            shutil.rmtree(folder)
        warnings.wait("status.json cannot be written")
        wait_until(job, lambda: all_run(job))
        if comes_back:
            os.rename(away, folder)
        job.stop("result")
        assert job.wait(timeout=PATIENCE) == "result"
    assert saved.read_text() == "saved\n"
    assert sum("status.json" in text for text in warnings.texts) == 1
    if comes_back:
        assert json.loads((folder / "status.json").read_text())["state"] == "finished"
        assert not list(folder.glob("status.json.*"))


def test_a_file_that_cannot_be_written_is_logged_once_until_it_can(tmp_path, warnings):
    files, folder = Files(), tmp_path / "run"
    for failures in (1, 2):
        for _ in range(3):
            files.append(str(folder / "log"), b"lost")
            files.write_status(str(folder / "status.json"), {})
        assert [sum(name in text for text in warnings.texts) for name in ("log ", "status.json ")] == [
            failures
        ] * 2
        folder.mkdir()
        files.append(str(folder / "log"), b"kept")
        files.write_status(str(folder / "status.json"), {"state": "running"})
        assert (folder / "log").read_bytes() == b"kept"
        assert json.loads((folder / "status.json").read_text()) == {"state": "running"}
        shutil.rmtree(folder)


def test_a_status_that_cannot_be_put_in_place_leaves_no_file(tmp_path, warnings):
    (tmp_path / "status.json").mkdir()
    Files().write_status(str(tmp_path / "status.json"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    warnings.wait("status.json cannot be written")


# Errors of the supervisor itself.


class Unreadable:
    def __reduce__(self):
        return int, ("not a number",)


def test_nodes_close_after_a_result_that_the_launcher_cannot_read(tmp_path):
    def main(path):
        lp.stop(Unreadable())

    program = saving_program(tmp_path / "saved")
    program.add_node(lp.PyNode(main, tmp_path / "saved"), label="main")
    with pytest.raises(ValueError, match="not a number"):
        lp.launch(program, "processes", stop_timeout=PATIENCE)
    assert (tmp_path / "saved").read_text() == "saved\n"


@pytest.mark.parametrize("when", ["once", "in every turn"])
def test_nodes_close_after_an_unexpected_error(tmp_path, monkeypatch, when):
    look, errors = SupervisedJob._look_at_clock, []

    def fail(job, *args):
        if all_run(job) and not (errors and when == "once"):
            errors.append(1)
            raise ZeroDivisionError("a mistake in the supervisor")
        if when == "in every turn" and errors:
            raise ZeroDivisionError("again")
        look(job, *args)

    monkeypatch.setattr(SupervisedJob, "_look_at_clock", fail)
    monkeypatch.setattr(processes, "_CLOSE_TIMEOUT", PATIENCE)  # a busy machine
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        lp.launch(saving_program(tmp_path / "saved", 2), "processes", stop_timeout=PATIENCE)
    assert (tmp_path / "saved").read_text() == "saved\n" * 2


@pytest.mark.parametrize("step", ["_clean_up", "_write_status"])
def test_an_error_at_the_very_end_ends_the_wait(tmp_path, monkeypatch, step):
    program = saving_program(tmp_path / "saved")
    finish = SupervisedJob._finish

    def break_the_end(job):
        clean_up = job._clean_up

        def fail():
            if step == "_clean_up":
                clean_up()
            raise OSError("at the end")

        monkeypatch.setattr(job, step, fail)
        finish(job)

    monkeypatch.setattr(SupervisedJob, "_finish", break_the_end)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    job = lp.start(program, "processes", directory=tmp_path)
    returned = threading.Event()

    def wait():
        with contextlib.suppress(OSError):
            job.wait()
        returned.set()

    threading.Thread(target=wait, daemon=True).start()
    job.stop()
    assert returned.wait(PATIENCE)
    assert job.over
    assert isinstance(job.outcome.error, OSError) == (step == "_clean_up")
