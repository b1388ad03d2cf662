"""Replay: Reverb's tables in Python, embedded, in shared memory or remote.

A program written for dm-reverb runs with `from framework import replay as reverb` if it does not use
TensorFlow's objects.
"""

from framework.nest import register as register_structure
from framework.replay import checkpointers, errors, platform
from framework.replay.client import Client
from framework.replay.errors import (
    CheckpointError,
    DeadlineExceededError,
    ReverbError,
    ServerClosed,
    ServerLost,
    StoreFullError,
    UnknownTableError,
    WouldBlockError,
)
from framework.replay.local.client import EmbeddedClient
from framework.replay.remote.client import ServedClient
from framework.replay.reverb_api import reverb_types, structured
from framework.replay.reverb_api.columns import TrajectoryColumn
from framework.replay.reverb_api.structured import StructuredWriter
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter, Writer
from framework.replay.server.server import Server, connect_node, serve_node
from framework.replay.sharded import ShardedClient
from framework.replay.tables import rate_limiters, selectors
from framework.replay.tables.table import Table
from framework.replay.types import PaddedSample, ReplaySample, SampleInfo, TableInfo, TensorSpec

item_selectors = selectors  # Reverb's name of the module

__all__ = [
    "CheckpointError",
    "Client",
    "DeadlineExceededError",
    "EmbeddedClient",
    "PaddedSample",
    "ReplaySample",
    "ReverbError",
    "SampleInfo",
    "ServedClient",
    "Server",
    "ServerClosed",
    "ServerLost",
    "ShardedClient",
    "StoreFullError",
    "StructuredWriter",
    "Table",
    "TableInfo",
    "TensorSpec",
    "TrajectoryColumn",
    "TrajectoryWriter",
    "UnknownTableError",
    "WouldBlockError",
    "Writer",
    "checkpointers",
    "connect_node",
    "errors",
    "item_selectors",
    "platform",
    "rate_limiters",
    "register_structure",
    "reverb_types",
    "selectors",
    "serve_node",
    "structured",
]
