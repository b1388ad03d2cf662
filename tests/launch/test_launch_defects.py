"""Mistakes of our own, and what only looks like one, in the log of a service."""

import pytest

from launch.defects import Defects


@pytest.mark.parametrize("kind, ends, logged", [(OSError, 9, 4), (MemoryError, 9, 4), (KeyError, 2, 3)])
def test_what_repeats_ends_the_service_or_fills_no_log(kind, ends, logged, caplog):
    defects = Defects()
    for time in range(min(8, ends + 1)):
        try:
            raise kind("a message")
        except kind as error:
            assert defects.repeats(error, "a message") is (time == ends)
    assert len(caplog.records) == logged
