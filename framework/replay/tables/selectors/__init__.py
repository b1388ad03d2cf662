"""Selectors: which item of a table is sampled, or removed, next."""

from framework.replay.tables.selectors.base import Selector
from framework.replay.tables.selectors.heaps import MaxHeap, MinHeap
from framework.replay.tables.selectors.ordered import Fifo, Lifo
from framework.replay.tables.selectors.prioritized import Prioritized
from framework.replay.tables.selectors.uniform import Uniform

__all__ = ["Fifo", "Lifo", "MaxHeap", "MinHeap", "Prioritized", "Selector", "Uniform"]
