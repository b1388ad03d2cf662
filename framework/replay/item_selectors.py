"""The names in `reverb.item_selectors`."""

from framework.replay.tables.selectors import *  # noqa: F403
