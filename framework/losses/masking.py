"""Masks and discounts that exclude elements from a loss and from its gradient.

A product with 0 is not enough: 0 times NaN is NaN, in the loss or in its gradient, and one such element
corrupts every parameter. Excluded elements are therefore replaced before any computation.
"""

from __future__ import annotations

import torch


def where_counted(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`values` where `mask` is not 0, else 0 without a gradient. A mask of None keeps all values."""
    return values if mask is None else torch.where(mask > 0, values, torch.zeros_like(values))


def discounted(discounts: torch.Tensor, next_values: torch.Tensor) -> torch.Tensor:
    """`discounts * next_values`; 0 where the discount is 0, even if the value is NaN or infinite."""
    return torch.where(discounts == 0, torch.zeros_like(discounts), discounts * next_values)


def check_alike(mask: torch.Tensor | None = None, **tensors: torch.Tensor) -> None:
    """Raises ValueError unless all shapes are equal: an extra axis would silently broadcast."""
    expected = None if mask is None else mask.shape
    for tensor in tensors.values():
        if expected is None:
            expected = tensor.shape
        elif tensor.shape != expected:
            named = tensors if mask is None else {**tensors, "mask": mask}
            shapes = {name: tuple(each.shape) for name, each in named.items()}
            raise ValueError(f"shapes: got {shapes}, expected the same for all.")
