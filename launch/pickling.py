"""Pickles code for other processes: importable objects by name, other objects by value."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from types import FunctionType, MappingProxyType
from typing import Any

import cloudpickle

# By the name of a class: why no copy of its objects works in another process, although they can be pickled.
_OF_ONE_PROCESS = {
    "optuna.storages._in_memory.InMemoryStorage": (
        "this Optuna study is in the memory of its process, and reports of a copy would not arrive there. "
        'Give it a database, optuna.create_study(storage="sqlite:///study.db"), or use the engine serial'
    )
}


def dumps(value: Any, buffer_callback: Callable[[Any], Any] | None = None) -> bytes:
    """Returns the pickle of a value for another process; `buffer_callback` as for `pickle.dumps`."""
    with io.BytesIO() as file:
        _CodePickler(file, 5, buffer_callback).dump(value)
        return file.getvalue()


class _CodePickler(cloudpickle.Pickler):
    """Pickles by value what is in modules that other processes cannot import, too.

    So it does with functions that no other process finds behind `functools.lru_cache` and `singledispatch`.
    It refuses `_OF_ONE_PROCESS`.
    """

    def reducer_override(self, obj: Any) -> Any:
        reason = _OF_ONE_PROCESS.get(f"{type(obj).__module__}.{type(obj).__qualname__}")
        if reason is not None:
            raise TypeError(reason)
        if isinstance(obj, functools._lru_cache_wrapper) and not _found_by_name(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(getattr(obj, "registry", None), MappingProxyType) and not _found_by_name(obj):
            return _dispatching, (dict(obj.registry),)  # The cache holds weak references.
        if isinstance(obj, functools.cached_property):  # With a lock, before Python 3.12.
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if isinstance(obj, (type, FunctionType)) and not _importable(obj.__module__ or ""):
            cloudpickle.register_pickle_by_value(sys.modules[obj.__module__])
        return super().reducer_override(obj)


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _dispatching(registry: dict[type, Any]) -> Any:
    function = functools.singledispatch(registry[object])
    for kind, implementation in registry.items():
        function.register(kind, implementation)
    return function


def _found_by_name(obj: Any) -> bool:
    """Returns whether another process finds this object where this process has it."""
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj and obj.__module__ != "__main__" and _importable(obj.__module__)


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
