"""The rescaling of values and the priorities of sequences, of R2D2."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework import losses


@given(st.floats(-1e6, 1e6), st.sampled_from([1e-3, 1e-2, 0.5]))
def test_rescaling_is_the_papers_formula(x, epsilon):
    expected = math.copysign(1.0, x) * (math.sqrt(abs(x) + 1.0) - 1.0) + epsilon * x
    rescaled = losses.value_rescaling(torch.tensor(x, dtype=torch.float64), epsilon)
    assert rescaled.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.5])
def test_the_inverse_is_exact_for_values_of_any_size(epsilon, dtype, tolerance):
    sizes = torch.logspace(-20, 6, 200, dtype=dtype)
    x = torch.cat([-sizes, torch.zeros(1, dtype=dtype), sizes])
    there = losses.inverse_value_rescaling(losses.value_rescaling(x, epsilon), epsilon)
    back = losses.value_rescaling(losses.inverse_value_rescaling(x, epsilon), epsilon)
    torch.testing.assert_close(there, x, rtol=10 * tolerance, atol=0.0)
    torch.testing.assert_close(back, x, rtol=10 * tolerance, atol=0.0)


def test_gradients_are_those_of_the_formula_at_zero_too():
    x = torch.tensor([-100.0, -0.1, 0.0, 0.1, 3.0, 1e4], dtype=torch.float64, requires_grad=True)
    losses.value_rescaling(x).sum().backward()
    expected = 0.5 / (x.detach().abs() + 1).sqrt() + 1e-3
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=0.0)
    y = losses.value_rescaling(x.detach()).requires_grad_()
    losses.inverse_value_rescaling(y).sum().backward()
    torch.testing.assert_close(y.grad, 1 / expected, rtol=1e-9, atol=0.0)


def test_priorities_mix_the_largest_and_the_mean_error_of_what_counts():
    errors = torch.tensor([[1.0, -3.0, 2.0, 50.0], [0.5, math.nan, math.inf, 0.0], [math.nan] * 4])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]])
    priorities = losses.sequence_priorities(errors.requires_grad_(), mask, eta=0.9)
    np.testing.assert_allclose(priorities, [0.9 * 3 + 0.1 * 2, 0.9 * 0.5 + 0.1 * 0.25, 0.0], rtol=1e-6)
    assert losses.sequence_priorities(errors, mask, 1.0).tolist() == [3.0, 0.5, 0.0]
    assert losses.sequence_priorities(errors, mask, 0.0).tolist() == [2.0, 0.25, 0.0]
    assert not priorities.requires_grad
