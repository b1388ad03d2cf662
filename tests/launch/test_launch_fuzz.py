"""A short run of the fuzzing of nodes and replay servers; the long one is ``wire_fuzz.py --seconds 120``."""

import os

import pytest
import warm_python

import launch


@pytest.mark.release
def test_fuzzed_frames_disturb_nobody():
    root = os.path.dirname(launch.__path__[0])
    fuzz = os.path.join(root, "benchmarks", "wire_fuzz.py")
    options = {"capture_output": True, "text": True, "timeout": 100}
    done = warm_python.run([fuzz, "--seconds", "4"], env={**os.environ, "PYTHONPATH": root}, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "malformed messages counted by the node" in done.stdout
