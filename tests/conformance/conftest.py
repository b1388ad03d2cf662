"""The engines of each test: those of this project, and other back ends as far as they are installed.

Where Ray is not installed, a small one of `helpers` stands in for it. In the environments of Ray and of
Launchpad `.ci/run` runs the tests with the mark `real` only; the others have the mark `release` there.
"""

from __future__ import annotations

import os

import fake_ray
import pytest
from engines import CONCURRENT, ENGINES, LAUNCHPAD, PROGRAM_ENGINES, REAL
from fake_ray import HAS_RAY
from patient_ray import started


@pytest.hookimpl(tryfirst=True)  # Before pytest looks at marks.
def pytest_collection_modifyitems(items):
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        engine = next(
            (value for value in parameters if isinstance(value, str) and value in ("ray", *LAUNCHPAD)), None
        )
        if engine is None:
            continue
        item.add_marker(engine.partition("_")[0])
        if engine in REAL and (engine == "launchpad" or not item.get_closest_marker("real")):
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


def fixture_of(engines):
    """A fixture whose value is the name of one of `engines`."""

    @pytest.fixture(params=engines)
    def engine(request):
        if request.param == "ray":
            request.getfixturevalue("ray_cluster")
        return request.param

    return engine


engine = fixture_of(ENGINES)
concurrent_engine = fixture_of(CONCURRENT)
supervised_engine = fixture_of(["processes", "ray"])  # Its nodes are watched and restarted.
program_engine = fixture_of(PROGRAM_ENGINES)
supervised_program_engine = fixture_of([name for name in PROGRAM_ENGINES if name in ("processes", "ray")])
