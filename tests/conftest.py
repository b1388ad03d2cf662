"""One thread per test process for numeric libraries: idle OpenMP threads spin, and tests share the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
