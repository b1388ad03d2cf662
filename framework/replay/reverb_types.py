"""The names in `reverb.reverb_types`, for annotations of programs that are written for Reverb."""

from framework.replay.tables.selectors import Selector
from framework.replay.types import TableInfo as TableInfo
from framework.types import Nest

SelectorType = Selector
SpecNest = Nest
