"""Losses of learned embeddings."""

from __future__ import annotations

import torch

from framework.losses.masking import check_alike


def embedding_loss(predicted: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Mean squared error of predictions of the next embedding (Fujimoto et al., 2023, equation 2).

    No gradient reaches the embeddings of the next observations. Otherwise, all embeddings would become equal.

    Args:
      predicted: `[..., Z]` embeddings of observations with actions, z^sa.
      following: `[..., Z]` embeddings of the next observations, z^s'.

    Raises:
      ValueError: The shapes differ.
    """
    check_alike(predicted=predicted, following=following)
    return (predicted - following.detach()).square().mean()
