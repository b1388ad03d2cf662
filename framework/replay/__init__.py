"""Replay: Reverb's tables in Python, embedded, in shared memory or remote.

A program written for dm-reverb runs with `from framework import replay as reverb` if it does not use
TensorFlow's objects.
"""

from framework.nest import register_structure as register_structure
from framework.replay import checkpointers as checkpointers
from framework.replay import errors as errors
from framework.replay import item_selectors as item_selectors
from framework.replay import platform as platform
from framework.replay import pybind as pybind
from framework.replay import rate_limiters as rate_limiters
from framework.replay import replay_sample as replay_sample
from framework.replay import reverb_types as reverb_types
from framework.replay import selectors as selectors
from framework.replay import server as server
from framework.replay import structured as structured
from framework.replay import structured_writer as structured_writer
from framework.replay import trajectory_writer as trajectory_writer
from framework.replay.client import Client as Client
from framework.replay.client import EmbeddedClient as EmbeddedClient
from framework.replay.client import ServedClient as ServedClient
from framework.replay.errors import CheckpointError as CheckpointError
from framework.replay.errors import DeadlineExceededError as DeadlineExceededError
from framework.replay.errors import ReverbError as ReverbError
from framework.replay.errors import ServerClosed as ServerClosed
from framework.replay.errors import ServerLost as ServerLost
from framework.replay.errors import StoreFullError as StoreFullError
from framework.replay.errors import UnknownTableError as UnknownTableError
from framework.replay.errors import WouldBlockError as WouldBlockError
from framework.replay.node import ReplayNode as ReplayNode
from framework.replay.node import ReverbNode as ReverbNode
from framework.replay.reverb_api.columns import TrajectoryColumn as TrajectoryColumn
from framework.replay.reverb_api.structured import StructuredWriter as StructuredWriter
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter as TrajectoryWriter
from framework.replay.reverb_api.trajectory_writer import Writer as Writer
from framework.replay.server.limits import Limits as Limits
from framework.replay.serving import Server as Server
from framework.replay.serving import connect_node as connect_node
from framework.replay.serving import serve_node as serve_node
from framework.replay.sharded import ShardedClient as ShardedClient
from framework.replay.tables.table import Table as Table
from framework.replay.types import PaddedSample as PaddedSample
from framework.replay.types import ReplaySample as ReplaySample
from framework.replay.types import SampleInfo as SampleInfo
from framework.replay.types import TableInfo as TableInfo
from framework.replay.types import TensorSpec as TensorSpec

# Programs written for Reverb import these from `reverb.server`. The server's own files do not know them.
server.Server, server.Table = Server, Table  # type: ignore[attr-defined]
