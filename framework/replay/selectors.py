"""The names in `reverb.selectors`."""

from framework.replay.tables.selectors import *  # noqa: F403
