"""The multiplier by a PID controller against the paper's pseudocode, with K_I outside of the integral."""

import numpy as np
import pytest
import torch

from framework import losses


@pytest.mark.parametrize("gains", [(0.3, 0.2, 0.0), (1.0, 0.05, 2.0), (0.0, 1.0, 0.0)])
def test_the_multiplier_against_the_pseudocode(gains):
    proportional, integral_gain, derivative = gains
    costs = np.random.default_rng(0).normal(0.3, 0.5, 40)
    limit, total, last, seen, expected = 0.25, 0.0, 0.0, [], []
    integral = previous = torch.zeros((), dtype=torch.float64)
    for cost in costs:
        delta = cost - limit
        total = max(0.0, total + delta)
        growth = max(0.0, cost - last)
        expected.append(max(0.0, proportional * delta + integral_gain * total + derivative * growth))
        last, new = cost, torch.tensor(cost)
        multiplier, integral = losses.pid_lagrangian(new, previous, integral, limit, gains)
        previous = new
        seen.append(float(multiplier))
    np.testing.assert_allclose(seen, expected, rtol=1e-9)
    assert min(expected) == 0.0 < max(expected)
