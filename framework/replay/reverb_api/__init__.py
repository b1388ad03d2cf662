"""Reverb's interface: writers of single steps, on top of the batch writer."""

from framework.replay.reverb_api import reverb_types, structured
from framework.replay.reverb_api.client import ReverbApi
from framework.replay.reverb_api.columns import TrajectoryColumn
from framework.replay.reverb_api.sequence_writer import Writer
from framework.replay.reverb_api.structured import StructuredWriter
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter

__all__ = [
    "ReverbApi",
    "StructuredWriter",
    "TrajectoryColumn",
    "TrajectoryWriter",
    "Writer",
    "reverb_types",
    "structured",
]
