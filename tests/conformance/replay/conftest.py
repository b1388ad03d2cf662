"""The back ends that are held to the same answers."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

import pytest

BACKENDS = ("framework.replay", "reverb")
# What dm-reverb before 0.8 lets pass.
UNCHECKED_BEFORE = {"ratio 0", "negative ratio", "a priority that is no number is refused"}


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "reverb" and importlib.util.find_spec("reverb") is None:
        pytest.skip("dm-reverb is not installed")
    return importlib.import_module(request.param)


@pytest.fixture
def skip_if_unchecked(backend):
    """``skip(name)`` where this dm-reverb does not make the check of that name."""

    def skip(name):
        if backend.__name__ == "reverb" and name in UNCHECKED_BEFORE:
            version = importlib.metadata.version("dm-reverb").split(".")
            if tuple(map(int, version[:2])) < (0, 8):
                pytest.skip("this dm-reverb does not check it")

    return skip
