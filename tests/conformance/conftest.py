"""The engines of each test: those of this project, and other back ends as far as they are installed.

In the environments of Ray and of Launchpad `.ci/run` runs the tests with the mark `real` only; there the
others have the mark `release`.
"""

from __future__ import annotations

import os

import pytest
from engines import CONCURRENT, ENGINES, LAUNCHPAD, PROGRAM_ENGINES, REAL, SUPERVISED
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
def ray_cluster():
    """It is one for all tests, as starting it takes seconds, and ends with the process.

    Files with clusters of their own shut it down first.
    """
    import ray

    if not ray.is_initialized():
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        options = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 100 << 20}
        started(lambda: ray.init(address="local", **options), clean=ray.shutdown)


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
supervised_engine = fixture_of(SUPERVISED)
program_engine = fixture_of(PROGRAM_ENGINES)
supervised_program_engine = fixture_of(SUPERVISED)
