"""The losses of models against loops in numpy."""

import numpy as np
import torch

from framework import losses


def test_the_error_of_each_model_is_the_mean_of_its_squares():
    predictions, targets = (torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    targets.requires_grad_()
    predictions.requires_grad_()
    errors = losses.ensemble_errors(predictions, targets)
    for k in range(2):
        pairs = zip(predictions[k].flatten().tolist(), targets[k].flatten().tolist(), strict=True)
        np.testing.assert_allclose(errors[k].item(), sum((p - t) ** 2 for p, t in pairs) / 15, rtol=1e-5)
    errors[1].backward()
    assert targets.grad is None and predictions.grad[0].abs().sum() == 0 < predictions.grad[1].abs().sum()


def test_a_model_stops_where_the_weighted_mean_of_its_errors_rises():
    errors = np.array([[4.0, 3.0, 2.0, 9.0, 1.0], [4.0, 5.0, 6.0, 6.5, 7.0]])
    averages, fell = torch.from_numpy(1.5 * errors[:, 0]), []
    for now in errors[:, 1:].T:
        averages, each = losses.rolling_validation(averages, torch.from_numpy(now), 0.25)
        fell.append(each.tolist())
    # The first weight is that of 1.5 times the first error.
    weights = np.array([0.25**4, *(0.75 * 0.25**age for age in (3, 2, 1, 0))])
    weighted = np.concatenate([1.5 * errors[:, :1], errors[:, 1:]], 1) @ weights
    np.testing.assert_allclose(averages, weighted)
    assert fell == [[True, True], [True, False], [False, False], [True, False]]
