"""The names in `reverb.structured`."""

from framework.replay.reverb_api.structured import *  # noqa: F403
