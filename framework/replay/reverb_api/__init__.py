"""Reverb's own interface: writers of single steps, on top of our writer of batches."""

from framework.replay.reverb_api import structured
from framework.replay.reverb_api.client import ReverbApi
from framework.replay.reverb_api.columns import TrajectoryColumn
from framework.replay.reverb_api.sequence_writer import Writer
from framework.replay.reverb_api.structured_writer import StructuredWriter
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter

__all__ = ["ReverbApi", "StructuredWriter", "TrajectoryColumn", "TrajectoryWriter", "Writer", "structured"]
