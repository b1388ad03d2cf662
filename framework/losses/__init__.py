"""Losses and their targets: pure functions of tensors, each named after its publication."""

from framework.losses.q_learning import double_q_errors, huber, importance_weights, q_learning_errors

__all__ = ["double_q_errors", "huber", "importance_weights", "q_learning_errors"]
