"""The names in `reverb.trajectory_writer`."""

from framework.replay.reverb_api.trajectory_writer import *  # noqa: F403
