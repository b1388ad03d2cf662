"""The engines that tests run on, as far as they are installed.

Nothing stands in for Ray: `.ci/run` runs the tests with the mark `real` on it, `make release` all of them.
"""

import importlib.util

HAS_RAY = importlib.util.find_spec("ray") is not None
RAY = ("ray",) if HAS_RAY else ()
# Launchpad's engines are there where dm-launchpad is (Python 3.10).
LAUNCHPAD = ("launchpad_mt", "launchpad") if importlib.util.find_spec("launchpad") else ()
# Those of other back ends: they run the tests with the mark `real` in `.ci/run`, the others at a release.
REAL = (*RAY, *LAUNCHPAD)
ENGINES = ("serial", "threads", "processes", *REAL)
CONCURRENT = ENGINES[1:]
SUPERVISED = ("processes", *RAY)  # Their nodes are watched and restarted.
PROGRAM_ENGINES = ("serial", "processes", *REAL)
