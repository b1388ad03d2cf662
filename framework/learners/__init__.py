"""Learners: batches in, parameters out."""

from framework.learners.distributed import LearnerGroup
from framework.learners.minibatches import EpochContext, MinibatchLearner, Prepared
from framework.learners.optimizers import Adam
from framework.learners.schedules import constant, linear_decay
from framework.learners.sgd import LossContext, LossOutput, SGDLearner

__all__ = [
    "Adam",
    "EpochContext",
    "LearnerGroup",
    "LossContext",
    "LossOutput",
    "MinibatchLearner",
    "Prepared",
    "SGDLearner",
    "constant",
    "linear_decay",
]
