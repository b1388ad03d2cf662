"""Pickles the code of nodes: importable objects by name, other objects by value."""

from __future__ import annotations

import functools
import io
import sys
from types import FunctionType
from typing import Any

import cloudpickle

from launch.engines.base import Unit

# By the name of a class: why no copy of its objects works in another process, although they can be pickled.
_OF_ONE_PROCESS = {
    "optuna.storages._in_memory.InMemoryStorage": (
        "this Optuna study is in the memory of its process, and reports of a copy would not arrive there. "
        'Give it a database, optuna.create_study(storage="sqlite:///study.db"), or use the engine serial'
    )
}


def dumps(unit: Unit) -> bytes:
    """Returns the pickle of a unit; raises a `TypeError` that names the node if it cannot be pickled."""
    try:
        with io.BytesIO() as file:
            _CodePickler(file).dump(unit)
            return file.getvalue()
    except Exception as error:
        raise TypeError(
            f"node {unit.label!r} cannot be sent to its process: {error}. Create the object in the node's "
            "constructor, and pass the constructor the arguments for it."
        ) from error


class _CodePickler(cloudpickle.Pickler):
    """Pickles by value what is in modules that other processes cannot import, too.

    So it does with functions of `__main__` behind `functools.lru_cache`. It refuses `_OF_ONE_PROCESS`.
    """

    def reducer_override(self, obj: Any) -> Any:
        reason = _OF_ONE_PROCESS.get(f"{type(obj).__module__}.{type(obj).__qualname__}")
        if reason is not None:
            raise TypeError(reason)
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, (type, FunctionType)) and not _importable(obj.__module__ or ""):
            cloudpickle.register_pickle_by_value(sys.modules[obj.__module__])
        return super().reducer_override(obj)


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


@functools.cache
def _importable(name: str) -> bool:
    """Returns whether another process can import this module: built in, or a file on the path."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None:  # cloudpickle handles it
        return True
    root = name.partition(".")[0]
    # importlib.util.find_spec would answer from sys.modules.
    found = (finder.find_spec(root, None) for finder in sys.meta_path)
    spec = next(filter(None, found), None)
    return spec is not None and ("." in name or spec.origin in (None, "frozen", file))
