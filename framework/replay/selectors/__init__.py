"""Selectors: which item of a table is sampled, or removed, next."""

from framework.replay.selectors.base import Selector
from framework.replay.selectors.heaps import MaxHeap, MinHeap
from framework.replay.selectors.ordered import Fifo, Lifo
from framework.replay.selectors.prioritized import Prioritized
from framework.replay.selectors.uniform import Uniform

__all__ = ["Fifo", "Lifo", "MaxHeap", "MinHeap", "Prioritized", "Selector", "Uniform"]
