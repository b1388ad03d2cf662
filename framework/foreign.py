"""Code that is not of this package, such as environments, observers and loggers of users.

It gets copies of the arrays that the framework goes on using, and its errors in `close` do not replace the
result of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tree

from framework.types import Nest
from launch.errors import message_of

_LOG = logging.getLogger(__name__)
_OURS = ("framework", "agents")


def is_foreign(thing: Any) -> bool:
    """Whether the class of `thing` is not of this package."""
    return type(thing).__module__.partition(".")[0] not in _OURS


def copies(nest: Nest) -> Nest:
    """The nest with a copy of each array."""
    if isinstance(nest, np.ndarray):
        return nest.copy()
    return tree.map_structure(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, nest)


def close(end: Callable[[], Any], name: str) -> None:
    """Calls `end`, which closes something. An error is logged under `name`: what was done stays done."""
    try:
        end()
    except (Exception, SystemExit) as error:
        call = f"{getattr(end, '__name__', 'close')}()"
        _LOG.warning("%s: %s raised %s: %s", name, call, type(error).__name__, message_of(error))
