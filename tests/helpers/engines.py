"""The engines that tests run on, as far as they are installed. A small Ray stands in for one that is not."""

import importlib.util

from fake_ray import HAS_RAY

# Launchpad's engines are there where dm-launchpad is (Python 3.10).
LAUNCHPAD = ("launchpad_mt", "launchpad") if importlib.util.find_spec("launchpad") else ()
ENGINES = ("serial", "threads", "processes", "ray", *LAUNCHPAD)
CONCURRENT = ENGINES[1:]
# Those of other back ends: they run the tests with the mark `real` in `.ci/run`, the others at a release.
REAL = (*(("ray",) if HAS_RAY else ()), *LAUNCHPAD)
# Whole programs import torch in each node, and show nothing of a Ray that is none.
PROGRAM_ENGINES = ("serial", "processes", *REAL)
