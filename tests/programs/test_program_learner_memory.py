"""The memory of a learner's process."""

import sys

import pytest
import warm_python

_CODE = """
import resource, sys
import numpy as np
from framework.programs import learner_worker
if sys.argv[1] == "keep":
    learner_worker.keep_freed_memory()
def use():
    return float(np.ones(20 << 20, np.uint8)[-1])
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc's malloc")
def test_freed_memory_is_used_again():
    faults = {}
    for mode in ("keep", "as usual"):
        done = warm_python.run(["-c", _CODE, mode], capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    assert faults["keep"] < 200 < faults["as usual"]
