"""The names in `reverb.replay_sample`."""

from framework.replay.types import ReplaySample as ReplaySample
from framework.replay.types import SampleInfo as SampleInfo
