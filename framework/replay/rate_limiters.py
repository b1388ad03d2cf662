"""The names in `reverb.rate_limiters`."""

from framework.replay.tables.rate_limiters import *  # noqa: F403
