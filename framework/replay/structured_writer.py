"""The names in `reverb.structured_writer`."""

from framework.replay.reverb_api.structured import *  # noqa: F403
