"""Environments: makes one batched dm_env environment from a name or a callable."""

from framework.environments import wrappers as wrappers
from framework.environments.action_masks import CombineActions as CombineActions
from framework.environments.base import FIRST as FIRST
from framework.environments.base import LAST as LAST
from framework.environments.base import MID as MID
from framework.environments.base import BatchedEnvironment as BatchedEnvironment
from framework.environments.base import EnvironmentFault as EnvironmentFault
from framework.environments.checks import Violation as Violation
from framework.environments.checks import check_environment as check_environment
from framework.environments.factory import make as make
from framework.environments.seeded_episodes import EVALUATION_SEED as EVALUATION_SEED
from framework.environments.seeded_episodes import SeededEpisodes as SeededEpisodes
from framework.environments.suites import options_in as options_in
from framework.environments.tasks import TaskEnvironment as TaskEnvironment
from framework.environments.tensor import TensorEnvironment as TensorEnvironment
from framework.environments.wrappers import ActionRepeat as ActionRepeat
from framework.environments.wrappers import ClipAction as ClipAction
from framework.environments.wrappers import EnvironmentWrapper as EnvironmentWrapper
from framework.environments.wrappers import Flatten as Flatten
from framework.environments.wrappers import FrameStack as FrameStack
from framework.environments.wrappers import ObservationActionReward as ObservationActionReward
from framework.environments.wrappers import OneHotPlanes as OneHotPlanes
from framework.environments.wrappers import RescaleAction as RescaleAction
from framework.environments.wrappers import ScaleObservation as ScaleObservation
from framework.environments.wrappers import SinglePrecision as SinglePrecision
from framework.environments.wrappers import StepLimit as StepLimit
