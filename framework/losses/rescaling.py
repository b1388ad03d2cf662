"""Values and priorities of recurrent replay (R2D2: Kapturowski et al., 2019)."""

from __future__ import annotations

import torch

from framework.losses.masking import check_alike, where_counted


def value_rescaling(values: torch.Tensor, epsilon: float = 1e-3) -> torch.Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x (Pohlen et al., 2018, proposition A.2), elementwise.

    Written so that small values are exact and the gradient at 0 is 1/2 + epsilon. Any shape.
    """
    return values / ((values.abs() + 1.0).sqrt() + 1.0) + epsilon * values


def inverse_value_rescaling(values: torch.Tensor, epsilon: float = 1e-3) -> torch.Tensor:
    """The inverse of `value_rescaling`, elementwise; exact where the textbook formula cancels digits.

    With s = sqrt(|x| + 1) - 1, h(x) is epsilon s^2 + (1 + 2 epsilon) s, and |x| is s (s + 2).
    """
    linear = 1.0 + 2.0 * epsilon
    s = 2.0 * values / (linear + (linear**2 + 4.0 * epsilon * values.abs()).sqrt())
    return s * (s.abs() + 2.0)


def sequence_priorities(errors: torch.Tensor, mask: torch.Tensor, eta: float = 0.9) -> torch.Tensor:
    """eta max_t |error_t| + (1 - eta) mean_t |error_t| (Kapturowski et al., 2019, section 2.3), `[N]`.

    Args:
      errors: `[N, T]` temporal-difference errors.
      mask: `[N, T]` 1 where an error counts. A sequence where none counts has the priority 0.
      eta: weight of the largest error.
    """
    check_alike(mask, errors=errors)
    sizes = where_counted(errors.detach().abs(), mask)
    mean = sizes.sum(1) / (mask > 0).sum(1).clamp(min=1)
    return eta * sizes.amax(1) + (1.0 - eta) * mean
