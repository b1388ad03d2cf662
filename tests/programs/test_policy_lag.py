"""When an unroll begins, in steps of an actor or in its part of the episodes of a batch."""

import pytest

from framework.programs.policy_lag import Lockstep


def begun(units, parts, lag, count):
    """`(done, needed version, units left)` of each unroll that begins before `count` units are done."""
    lockstep, unrolls = Lockstep("actor-0", None, None, units, lag, parts), []
    lockstep.start(10)
    for done in range(count):
        needed = lockstep.needed_version(done)
        if needed is not None:
            lockstep.begin(done, needed)
            unrolls.append((done, needed, lockstep.units_left(done)))
        assert lockstep.needed_version(done) is None
        assert lockstep.may_step(done, version=0)
    return unrolls


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
    lockstep = Lockstep("actor-0", None, None, units, 0, parts)
    lockstep.start(0)
    done = 0
    for unroll in range(1, 40):
        lockstep.begin(done, unroll - 1)
        done += lockstep.units_left(done)
        needed = lockstep.needed_version(done)
        assert needed is not None and needed >= unroll
        assert parts * done >= units * needed  # Of all actors together: the learner can make this version.
