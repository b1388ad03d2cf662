"""Experience to replay items: n-step transitions, sequences, whole episodes."""

from framework.adders.base import QUEUE_TABLE as QUEUE_TABLE
from framework.adders.base import REPLAY_TABLE as REPLAY_TABLE
from framework.adders.base import Adder as Adder
from framework.adders.block import Block as Block
from framework.adders.block import ItemBatch as ItemBatch
from framework.adders.block import ItemFormat as ItemFormat
from framework.adders.block_adder import BlockAdder as BlockAdder
from framework.adders.episode import EpisodeAdder as EpisodeAdder
from framework.adders.frames import restacked as restacked
from framework.adders.hindsight import HindsightAdder as HindsightAdder
from framework.adders.item_writer import PriorityFn as PriorityFn
from framework.adders.nstep import NStepTransitionAdder as NStepTransitionAdder
from framework.adders.returns import RETURN_TO_GO as RETURN_TO_GO
from framework.adders.returns import RUNNING_RETURN as RUNNING_RETURN
from framework.adders.returns import ReturnToGoAdder as ReturnToGoAdder
from framework.adders.returns import RunningReturnAdder as RunningReturnAdder
from framework.adders.sequence import EndOfEpisodeBehavior as EndOfEpisodeBehavior
from framework.adders.sequence import SequenceAdder as SequenceAdder
from framework.adders.unroll import UnrollAdder as UnrollAdder
from framework.adders.wrappers import ForkingAdder as ForkingAdder
from framework.adders.wrappers import IgnoreExtrasAdder as IgnoreExtrasAdder
