"""Rows of results that are made in several sittings."""

import json
import pathlib
import signal
import time

import pytest
import warm_python

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.release
def test_a_row_that_was_stopped_goes_on(tmp_path):
    command = ["-m", "results.learning", "masked-a2c", "--seeds", "1", "--out", tmp_path]
    run = tmp_path / "masked-a2c-1"
    with warm_python.Popen(command, cwd=ROOT) as first:
        deadline = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 128 + signal.SIGTERM
    assert not (run / "result.json").exists()
    (stopped,) = json.loads((run / "sittings.json").read_text())
    warm_python.run(command, cwd=ROOT, check=True, timeout=100)
    (row,) = json.loads((tmp_path / "masked-a2c.json").read_text())["runs"]
    assert row["sittings"] == 2
    assert row["cpu_seconds"] > stopped[0] > 0
    assert row["curve"]["env_steps"] == sorted(row["curve"]["env_steps"])
    assert row["steps"] == 10_000
