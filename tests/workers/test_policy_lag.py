"""When an unroll begins, in steps of an actor or in its part of the episodes of a batch."""

import types

import pytest

from framework.runs.services import Counter
from framework.workers.collector import Steps
from framework.workers.lockstep import Lockstep, Unrolls


def begun(units, parts, lag, count):
    """`(done, needed version, units left)` of each unroll that begins before `count` units are done."""
    unrolls, found = Unrolls(units, lag, parts), []
    assert unrolls.needed_version() is None  # Before the first version is known.
    unrolls.first = 10
    for done in range(count):
        needed = unrolls.needed_version()
        if needed is not None:
            unrolls.begin()
            found.append((done, needed, unrolls.left))
        assert unrolls.needed_version() is None and unrolls.go_on() == (unrolls.left > 1)
        unrolls.took(Steps(1, None))
    return found


@pytest.mark.parametrize(
    ("units", "parts", "lag", "expected"),
    [
        (4, 1, 0, [(0, 10, 4), (4, 11, 4), (8, 12, 4)]),
        (4, 1, 1, [(0, 10, 4), (4, 10, 4), (8, 11, 4)]),
        # Batches of 5 from two actors: the parts have 3, 2, 3, ... episodes.
        (5, 2, 0, [(0, 10, 3), (3, 11, 2), (5, 12, 3), (8, 13, 2)]),
        (2, 2, 2, [(done, 10 + max(0, done - 2), 1) for done in range(9)]),
    ],
)
def test_unrolls_begin_with_the_version_that_the_lag_allows(units, parts, lag, expected):
    assert begun(units, parts, lag, 9) == expected


@pytest.mark.parametrize(("units", "parts"), [(5, 2), (25, 3), (4, 3), (3, 7)])
def test_where_all_actors_wait_their_episodes_make_a_batch(units, parts):
    unrolls = Unrolls(units, 0, parts, of_episodes=True)
    unrolls.first = 0
    for unroll in range(1, 40):
        unrolls.begin()
        unrolls.took(Steps(9, None))
        unrolls.took(Steps(9, {"episode_length": [5] * unrolls.left}))
        needed = unrolls.needed_version()
        assert needed is not None and needed >= unroll and not unrolls.go_on()
        # Of all actors together: the learner can make this version.
        assert parts * unrolls.done >= units * needed


def test_an_unroll_waits_for_its_version_also_after_a_restart_that_skips_some():
    learner = types.SimpleNamespace(version=0)
    learner.wait_for_version = lambda version, *_: learner.version >= version
    collector = types.SimpleNamespace(version=0, adders=())
    collector.update = lambda: setattr(collector, "version", learner.version)
    gate = Lockstep("actor-0", learner, Counter(), collector, Unrolls(1, 0))
    for newest in (0, 60, 61, 62):
        learner.version = newest
        assert gate.open() and collector.version == newest
        gate.took(Steps(1, None))
        assert not gate.open()
