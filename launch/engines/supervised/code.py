"""Ships the code of nodes: what the other process can import goes by name, all else by value."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cloudpickle

from launch.engines.base import Unit
from launch.nodes import Node


def dumps(unit: Unit) -> bytes:
    """The pickle of a unit. TypeError that names the node if it cannot be pickled."""
    by_value = []
    try:
        for module in {id(m): m for leaf in unit.leaves for m in _modules(leaf.node)}.values():
            cloudpickle.register_pickle_by_value(module)
            by_value.append(module)
        return cloudpickle.dumps(unit)
    except Exception as error:
        raise TypeError(
            f"node {unit.label!r} cannot be sent to its process: {error}. Pass what is needed to make "
            "such an object and make it in the node's constructor"
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _modules(node: Node) -> Iterator[ModuleType]:
    """The modules of a node's functions and arguments that no other process could import."""
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
    """Whether ``import`` finds this module anew: built in, or a file of that name on the path."""
    name = module.__name__
    if name == "__main__":  # cloudpickle knows
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
    return "." in name or spec.origin is None or spec.origin == module.__file__
