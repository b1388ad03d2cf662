"""The names in `reverb.pybind`, dm-reverb's compiled classes, that exist here."""

from framework.replay.client import Client
from framework.replay.reverb_api.structured import StructuredWriter
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter, Writer
from framework.replay.tables.rate_limiters import RateLimiter
from framework.replay.tables.selectors import Fifo as FifoSelector
from framework.replay.tables.selectors import Lifo as LifoSelector
from framework.replay.tables.selectors import Prioritized as PrioritizedSelector
from framework.replay.tables.selectors import Selector as ItemSelector
from framework.replay.tables.selectors import Uniform as UniformSelector
from framework.replay.tables.table import Table

__all__ = [
    "Client",
    "FifoSelector",
    "ItemSelector",
    "LifoSelector",
    "PrioritizedSelector",
    "RateLimiter",
    "StructuredWriter",
    "Table",
    "TrajectoryWriter",
    "UniformSelector",
    "Writer",
]
