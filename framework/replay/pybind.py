"""The names in `reverb.pybind`, dm-reverb's compiled classes, that exist here."""

from framework.replay.client import Client as Client
from framework.replay.reverb_api.structured import StructuredWriter as StructuredWriter
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter as TrajectoryWriter
from framework.replay.reverb_api.trajectory_writer import Writer as Writer
from framework.replay.tables import selectors
from framework.replay.tables.rate_limiters import RateLimiter as RateLimiter
from framework.replay.tables.table import Table as Table

FifoSelector, LifoSelector, UniformSelector = selectors.Fifo, selectors.Lifo, selectors.Uniform
ItemSelector, PrioritizedSelector = selectors.Selector, selectors.Prioritized
