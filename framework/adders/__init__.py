"""Experience to replay items: n-step transitions, sequences, whole episodes."""

from framework.adders.base import QUEUE_TABLE, REPLAY_TABLE, Adder
from framework.adders.episode import EpisodeAdder
from framework.adders.nstep import NStepTransitionAdder
from framework.adders.sequence import EndOfEpisodeBehavior, SequenceAdder
from framework.adders.unroll import UnrollAdder
from framework.adders.wrappers import ForkingAdder, IgnoreExtrasAdder

__all__ = [
    "QUEUE_TABLE",
    "REPLAY_TABLE",
    "Adder",
    "EndOfEpisodeBehavior",
    "EpisodeAdder",
    "ForkingAdder",
    "IgnoreExtrasAdder",
    "NStepTransitionAdder",
    "SequenceAdder",
    "UnrollAdder",
]
