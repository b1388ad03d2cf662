"""A short run of the fuzzing of nodes and replay servers; the long one takes `--seconds 120`."""

import os

import pytest
import warm_python

import launch


@pytest.mark.release
def test_fuzzed_frames_disturb_nobody():
    root = os.path.dirname(launch.__path__[0])
    options = {"capture_output": True, "text": True, "timeout": 100}
    done = warm_python.run(["-m", "benchmarks.rpc.fuzz", "--seconds", "4"], cwd=root, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "malformed messages counted by the node" in done.stdout
