"""Learners, which update parameters from batches."""

from framework.learners.context import LossContext as LossContext
from framework.learners.context import LossOutput as LossOutput
from framework.learners.distributed import LearnerGroup as LearnerGroup
from framework.learners.laprop import LaProp as LaProp
from framework.learners.minibatches import MinibatchLearner as MinibatchLearner
from framework.learners.minibatches import Prepared as Prepared
from framework.learners.optimizers import Adam as Adam
from framework.learners.optimizers import rmsprop as rmsprop
from framework.learners.optimizers import with_own_rate as with_own_rate
from framework.learners.optimizers import with_rates as with_rates
from framework.learners.schedules import linear as linear
from framework.learners.schedules import linear_decay as linear_decay
from framework.learners.sgd import SGDLearner as SGDLearner
