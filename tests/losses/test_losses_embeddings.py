"""The loss of embeddings: worked by hand, without a gradient in what is predicted."""

import pytest
import torch

from framework import losses


def test_embedding_loss_by_hand():
    predicted = torch.tensor([[1.0, 2.0], [0.0, -1.0]], requires_grad=True)
    following = torch.tensor([[0.0, 2.0], [2.0, 1.0]], requires_grad=True)
    loss = losses.embedding_loss(predicted, following)
    assert loss.item() == (1.0 + 0.0 + 4.0 + 4.0) / 4
    loss.backward()
    assert predicted.grad.tolist() == [[0.5, 0.0], [-1.0, -1.0]] and following.grad is None


def test_embedding_loss_refuses_what_would_broadcast():
    with pytest.raises(ValueError, match="shapes: got"):
        losses.embedding_loss(torch.zeros(2, 3), torch.zeros(1, 3))
