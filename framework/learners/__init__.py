"""Learners, which update parameters from batches."""

from framework.learners.distributed import LearnerGroup
from framework.learners.minibatches import MinibatchLearner, Prepared
from framework.learners.schedules import linear, linear_decay
from framework.learners.sgd import Adam, LossContext, LossOutput, SGDLearner

__all__ = [
    "Adam",
    "LearnerGroup",
    "LossContext",
    "LossOutput",
    "MinibatchLearner",
    "Prepared",
    "SGDLearner",
    "linear",
    "linear_decay",
]
