"""The engines of each test: those of this project, and other back ends as far as they are installed.

Where Ray is not installed, a small one of `helpers` stands in for it. In the environments of Ray and of
Launchpad `.ci/run` runs the tests with the mark `real` only; the others have the mark `release` there.
"""

from __future__ import annotations

import importlib.util
import os

import fake_ray
import pytest
from fake_ray import HAS_RAY
from patient_ray import started

# Launchpad's engines are there where dm-launchpad is (Python 3.10).
LAUNCHPAD = ("launchpad_mt", "launchpad") if importlib.util.find_spec("launchpad") else ()
ENGINES = ("serial", "threads", "processes", "ray", *LAUNCHPAD)
CONCURRENT = tuple(engine for engine in ENGINES if engine != "serial")


@pytest.hookimpl(tryfirst=True)  # Before pytest looks at marks.
def pytest_collection_modifyitems(items):
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        engine = next((value for value in parameters if value in ENGINES[3:]), None)
        if engine is None:
            continue
        item.add_marker(engine.partition("_")[0])
        is_real = engine != "ray" or HAS_RAY
        if is_real and (engine == "launchpad" or not item.get_closest_marker("real")):
            item.add_marker("release")


@pytest.fixture
def ray_cluster(monkeypatch):
    """Ray's own is one for all tests, as starting it takes seconds, and ends with the process.

    Files with clusters of their own shut it down first.
    """
    if not HAS_RAY:
        fake_ray.install(monkeypatch)
        yield
        fake_ray.shutdown()
        return
    import ray

    if not ray.is_initialized():
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        options = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 100 << 20}
        started(lambda: ray.init(address="local", **options), clean=ray.shutdown)
    yield


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


@pytest.fixture(params=["processes", "ray"])
def supervised_engine(request):
    """Those whose nodes a supervisor watches and restarts."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param
