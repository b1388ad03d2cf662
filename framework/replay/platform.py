"""The place where programs written for Reverb look for checkpointers: ``platform.checkpointers_lib``."""

from framework.replay import checkpointers as checkpointers_lib  # noqa: F401
