"""The queue, with short processes in place of runs."""

import signal
import subprocess
import sys
import threading

import pytest
from background import until

from framework.experiments.queue import RunQueue, Tail, Trial, newest
from framework.experiments.slots import Slot
from framework.experiments.sweep import Sweep, SweepFolder, Variant

BEGIN = """
import json, os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1]); run.mkdir(exist_ok=True)
def finish(**more): (run / "result.json").write_text(json.dumps({"episode_return": 3.0, **more}))
def row(**numbers): open(run / "metrics.jsonl", "a").write(json.dumps(numbers) + "\\n")
def stop(*_): sys.exit(143)
"""
WAIT = "signal.signal(signal.SIGTERM, stop); row(env_steps=1); signal.pause()"


class Child:
    """A run whose code is given."""

    def __init__(self, folder, name, code):
        with open(folder.log(name), "ab") as log:
            command = [sys.executable, "-c", BEGIN + code, str(folder.run(name))]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self):
        return self.process.wait()

    def stop(self, at_once=False):
        self.process.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)

    def cpu_seconds(self):
        return 1.0


@pytest.fixture
def sweep(tmp_path):
    """Makes a queue of runs with these codes by name, in a folder that stays."""
    folder = SweepFolder(tmp_path, Sweep())
    folder.save()
    told = []

    def make(codes, slots=1, trial=Trial, **options):
        variants = [Variant(name, "dqn", "env", 1, {}) for name in codes]
        execute = lambda name, slot: Child(folder, name, codes[name])  # noqa: E731
        tell = lambda *state: told.append(state)  # noqa: E731
        trials = (trial([variant]) for variant in variants)
        return RunQueue(folder, trials, [Slot((), ())] * slots, execute, tell=tell, **options)

    make.folder, make.told = folder, told
    return make


def run_all(queue):
    with queue:
        assert queue.wait(60.0)


def test_states_of_runs_however_they_end(sweep):
    codes = {
        "good": "finish()",
        "fails": "print('before'); print('error: learning rate'); print('after'); sys.exit(1)",
        "raises": "raise KeyError('x')",
        "killed": "os.kill(os.getpid(), signal.SIGKILL)",
        "without_a_result": "print('an end')",
        "stopped_by_others": "sys.exit(143)",
    }
    run_all(sweep(codes))
    found = {
        name: (of["state"], of.get("error", "")) for name, of in SweepFolder(sweep.folder.path).states.items()
    }
    assert found.pop("killed")[1].startswith(
        "It was killed by SIGKILL. If no user sent it, the memory was full"
    )
    assert found == {
        "good": ("finished", ""),
        "fails": ("failed", "learning rate"),
        "raises": ("failed", "KeyError: 'x'"),
        "without_a_result": ("failed", "an end"),
        "stopped_by_others": ("stopped", ""),
    }
    assert sweep.told[:3] == [("good", "running"), ("good", "finished"), ("fails", "running")]


def test_a_sweep_that_is_started_again_does_what_is_left(sweep):
    count = "open(run / 'starts', 'a').write('x'); "
    codes = {"good": count + "finish()", "bad": count + "sys.exit(1)", "stopped": count + "sys.exit(143)"}
    starts = lambda: [len((sweep.folder.run(name) / "starts").read_text()) for name in codes]  # noqa: E731
    run_all(sweep(codes))
    run_all(sweep(codes))
    assert starts() == [1, 1, 2]
    run_all(sweep(codes, again=True))
    assert starts() == [1, 2, 3]


def test_the_error_is_that_of_this_start(sweep):
    run_all(sweep({"a": "print('error: old'); sys.exit(1)"}))
    run_all(sweep({"a": "sys.exit(4)"}, again=True))
    assert sweep.folder.states["a"]["error"] == "It exited with code 4."


def test_as_many_run_at_a_time_as_there_are_slots(sweep):
    codes = {name: f"row(env_steps=7); name = {name!r}; " + WAIT for name in "abc"}
    with sweep(codes, slots=2) as queue:
        until(lambda: [each.newest for each in queue.running()] == [{"env_steps": 1}] * 2 or queue.wait(0.01))
        assert sweep.folder.state("c") == "waiting"
        queue.stop()
        assert queue.wait(60.0) and queue.running() == []
    assert [sweep.folder.state(name) for name in "abc"] == ["stopped", "stopped", "waiting"]


def test_leaving_the_block_stops_what_runs(sweep):
    queue = sweep({"a": WAIT})
    with pytest.raises(ZeroDivisionError), queue:
        until(lambda: queue.running() or queue.wait(0.01))
        (running,) = queue.running()
        until(lambda: running.newest or queue.wait(0.01))
        raise ZeroDivisionError
    assert running.execution.process.returncode == 143 and threading.active_count() < 20


def test_the_third_request_kills(sweep):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); row(env_steps=1)\nwhile True: signal.pause()"
    with sweep({"a": stubborn}) as queue:
        until(lambda: [each.newest for each in queue.running() if each.newest] or queue.wait(0.01))
        for _ in range(2):
            queue.stop()
        assert not queue.wait(0.2)
        queue.stop()
        assert queue.wait(60.0)
    assert "SIGKILL" in sweep.folder.states["a"]["error"]


class Impatient(Trial):
    """Ends a run whose return is below 5."""

    seen, ended = [], []

    def prunes(self, variant, row, cpu_seconds):
        self.seen.append((variant.name, row["episode_return"], cpu_seconds))
        return row["episode_return"] < 5

    def end(self, states):
        self.ended.append(states)


def test_a_trial_that_prunes_ends_its_run(sweep):
    evaluation = "row(label='actor', episode_return=0.0); row(label='evaluator', episode_return={}); "
    codes = {"low": evaluation.format(1.0) + WAIT, "high": evaluation.format(9.0) + "finish()"}
    queue = sweep(codes, trial=Impatient)
    with queue:
        until(lambda: queue.wait(0.05))
    assert Impatient.ended == [["pruned"], ["finished"]]
    assert Impatient.seen == [("low", 1.0, 1.0), ("high", 9.0, 1.0)]  # Also rows that came at the end.
    Impatient.ended.clear()
    run_all(sweep(codes, trial=Impatient))
    assert Impatient.ended == [["pruned"], ["finished"]] and len(Impatient.seen) == 2


def test_an_error_of_a_slot_ends_the_sweep(sweep):
    queue = sweep({"a": WAIT, "b": None}, slots=2)  # No code can be made of None.
    with pytest.raises(TypeError), queue:
        while not queue.wait(60.0):
            pass
    assert sweep.folder.state("a") in ("stopped", "waiting")


def test_a_run_that_another_process_has_finished_meanwhile_is_done(sweep):
    run_all(sweep({"a": "sys.exit(1)"}))
    (sweep.folder.run("a") / "result.json").write_text("{}")
    run_all(sweep({"a": "sys.exit(1)"}, again=True))
    assert sweep.told.count(("a", "running")) == 1


def test_rows_of_a_file_that_grows_and_is_replaced(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    for text, rows in (
        ('{"a": 1}\n{"a": 2', [{"a": 1}]),
        ('{"a": 1}\n{"a": 2}\nnot json\n[3]\n{"a": 4}\n', [{"a": 2}, {"a": 4}]),
        ('{"a": 1}\n{"a": 2}\nnot json\n[3]\n{"a": 4}\n', []),
        ('{"b": 1}\n', [{"b": 1}]),
    ):
        path.write_text(text)
        assert tail.new() == rows
    rows = [
        {"label": "evaluator", "env_steps": 5, "episode_return": 2.0},
        {"label": "a", "episode_return": 1.0},
    ]
    assert newest(rows) == {"env_steps": 5, "episode_return": 2.0} and newest([]) == {}
