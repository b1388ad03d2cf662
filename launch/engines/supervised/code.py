"""Pickles the code of nodes: importable objects by name, other objects by value."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cloudpickle

from launch.engines.base import Unit
from launch.nodes import ProgramNode

# By the name of a class: why no copy of its objects works in another process, although they can be pickled.
_OF_ONE_PROCESS = {
    "optuna.storages._in_memory.InMemoryStorage": (
        "this Optuna study is in the memory of its process, and reports of a copy would not arrive there. "
        'Give it a database, optuna.create_study(storage="sqlite:///study.db"), or use the engine serial'
    )
}


def dumps(unit: Unit) -> bytes:
    """Returns the pickle of a unit; raises a `TypeError` that names the node if it cannot be pickled."""
    by_value = []
    try:
        for module in {id(m): m for leaf in unit.leaves for m in _modules(leaf.node)}.values():
            cloudpickle.register_pickle_by_value(module)
            by_value.append(module)
        with io.BytesIO() as file:
            _CodePickler(file).dump(unit)
            return file.getvalue()
    except Exception as error:
        raise TypeError(
            f"node {unit.label!r} cannot be sent to its process: {error}. Create the object in the node's "
            "constructor, and pass the constructor the arguments for it."
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


class _CodePickler(cloudpickle.Pickler):
    """Also pickles functions of `__main__` behind `functools.lru_cache`, which pickle by name only.

    Refuses `_OF_ONE_PROCESS`.
    """

    def reducer_override(self, obj: Any) -> Any:
        reason = _OF_ONE_PROCESS.get(f"{type(obj).__module__}.{type(obj).__qualname__}")
        if reason is not None:
            raise TypeError(reason)
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _modules(node: ProgramNode) -> Iterator[ModuleType]:
    """Yields the modules of a node's functions and arguments that another process cannot import."""
    for value in (node._fn, *_values(node._args), *_values(node._kwargs)):
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if module is not None and not _importable(module):
            yield module


def _values(nest: Any) -> Iterator[Any]:
    if isinstance(nest, dict):
        nest = nest.values()
    if isinstance(nest, (list, tuple, set, type({}.values()))):
        for value in nest:
            yield from _values(value)
    else:
        yield nest
        yield type(nest)


def _importable(module: ModuleType) -> bool:
    """Returns whether another process can import this module: built in, or a file on the path."""
    name = module.__name__
    if name == "__main__":  # cloudpickle handles it
        return True
    root = name.partition(".")[0]
    if root in sys.builtin_module_names or getattr(module, "__file__", None) is None:
        return True
    spec = None
    for finder in sys.meta_path:  # not importlib.util.find_spec: that answers from sys.modules
        spec = finder.find_spec(root, None)
        if spec is not None:
            break
    if spec is None:
        return False
    return "." in name or spec.origin in (None, "frozen", module.__file__)
