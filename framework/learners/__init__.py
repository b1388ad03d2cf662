"""Learners: batches in, parameters out."""

from framework.learners.schedules import constant, linear_decay
from framework.learners.sgd import LossContext, LossOutput, SGDLearner

__all__ = ["LossContext", "LossOutput", "SGDLearner", "constant", "linear_decay"]
