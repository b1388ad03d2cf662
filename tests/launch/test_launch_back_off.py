"""How long a restarted node waits."""

from __future__ import annotations

import pytest

from launch.engines.base import FIRST_BACK_OFF_S, LONG_LIFE_S, LONGEST_BACK_OFF_S, BackOff

F, L = FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S


@pytest.mark.parametrize(
    ("lives", "waits"),
    [
        pytest.param([0, 0, 0, 0], [F, 2 * F, 4 * F, 8 * F], id="short lives double it"),
        pytest.param([0] * 8, [F, 2 * F, 4 * F, 8 * F, 16 * F, 32 * F, L, L], id="up to the longest"),
        pytest.param([0, 0, LONG_LIFE_S, 0], [F, 2 * F, F, 2 * F], id="a long life begins again"),
        pytest.param([LONG_LIFE_S] * 9, [F] * 9, id="nothing but long lives"),
    ],
)
def test_waits_after_lives(lives, waits):
    back_off = BackOff()
    assert [back_off.after(life) for life in lives] == pytest.approx(waits)


def test_the_thousandth_wait_is_still_a_number():
    back_off = BackOff()
    assert [back_off.after(0.0) for _ in range(2_000)][-1] == LONGEST_BACK_OFF_S
