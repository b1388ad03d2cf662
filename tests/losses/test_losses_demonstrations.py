"""DQfD's margin loss against values worked by hand, and against a loop."""

import numpy as np
import pytest
import torch

from framework import losses


def test_the_margin_loss_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, 4, generator=generator, requires_grad=True)
    actions = torch.randint(4, (50,), generator=generator)
    loss = losses.large_margin_loss(values, actions, 0.3)
    for each, row, action in zip(loss, values, actions, strict=True):
        rivals = [value + (0.0 if index == action else 0.3) for index, value in enumerate(row)]
        assert each.item() == pytest.approx((max(rivals) - row[action]).item(), abs=1e-6)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    np.testing.assert_allclose(gradient.sum(1), 0.0, atol=1e-6)  # The level of the values does not matter.


def test_wrong_shapes_are_an_error():
    with pytest.raises(ValueError, match="actions"):
        losses.large_margin_loss(torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64))
