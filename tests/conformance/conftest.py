"""The engines that are installed here."""

from __future__ import annotations

import importlib.util
import os

import pytest
from patient_ray import started

# Launchpad's engines are there where dm-launchpad is (Python 3.10).
LAUNCHPAD = ("launchpad_mt", "launchpad") if importlib.util.find_spec("launchpad") else ()
# So is Ray's.
RAY = ("ray",) if importlib.util.find_spec("ray") else ()
ENGINES = ("serial", "threads", "processes", *RAY, *LAUNCHPAD)
CONCURRENT = tuple(engine for engine in ENGINES if engine != "serial")


@pytest.fixture
def ray_cluster():
    """One for all tests, as starting Ray takes seconds; files with clusters of their own shut it down first.

    It ends with the process.
    """
    import ray

    if ray.is_initialized():
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 100 << 20}
    started(lambda: ray.init(address="local", **options), clean=ray.shutdown)


@pytest.fixture(params=ENGINES)
def engine(request):
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.fixture(params=CONCURRENT)
def concurrent_engine(request):
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param
