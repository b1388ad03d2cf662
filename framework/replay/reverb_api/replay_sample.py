"""The names in `reverb.replay_sample`."""

from framework.replay.types import ReplaySample, SampleInfo

__all__ = ["ReplaySample", "SampleInfo"]
