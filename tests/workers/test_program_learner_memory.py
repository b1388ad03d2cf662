"""The memory of a learner's process."""

import sys

import pytest
import warm_python

_CODE = """
import resource
import numpy as np
from framework.workers import worker
def use():
    return float(np.ones(20 << 20, np.uint8)[-1])
def faults():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
worker.keep_freed_memory()
print(before, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc's malloc")
def test_freed_memory_is_used_again():
    done = warm_python.run(["-c", _CODE], capture_output=True, text=True, check=True)
    as_usual, kept = map(int, done.stdout.split())
    assert kept < 200 < as_usual
