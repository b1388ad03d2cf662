"""One thread per test process for numeric libraries: idle OpenMP threads spin, and tests run several at once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
