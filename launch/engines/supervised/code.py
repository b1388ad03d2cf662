"""Pickles the code of nodes."""

from __future__ import annotations

from launch import pickling
from launch.engines.base import Unit


def dumps(unit: Unit) -> bytes:
    """Returns the pickle of a unit; raises a `TypeError` that names the node if it cannot be pickled."""
    try:
        return pickling.dumps(unit)
    except Exception as error:
        raise TypeError(
            f"node {unit.label!r} cannot be sent to its process: {error}. Create the object in the node's "
            "constructor, and pass the constructor the arguments for it."
        ) from error
