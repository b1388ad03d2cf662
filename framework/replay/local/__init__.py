"""Replay in the process of its tables: direct calls, no messages."""
