"""Nests: dicts, lists, tuples and named tuples with leaves of any other type.

The order of leaves is dm-tree's: dicts by sorted keys, sequences by position:

```python
leaves, structure = flatten({"b": x, "a": (y, z)})      # [y, z, x]
paths(structure)                                        # ["a/0", "a/1", "b"]
packer(structure)([1, 2, 3])                            # {"a": (1, 2), "b": 3}
```

A *structure* consists of lists, strings and numbers, so JSON and MessagePack can encode it. `freeze` makes it
hashable. `flattener` and `unflattener` are fast for many nests with the structure of one template.
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from framework.types import Nest, OneStep, Step, Transition

# The path of the leaf in a nest that is a single leaf: names of columns must not be empty.
ROOT = "data"

_INNER = (Mapping, tuple, list)

Structure = list[Any]
Pack = Callable[[Sequence[Any]], Nest]
_Class = TypeVar("_Class", bound=type)

_NAMED_TUPLES: dict[tuple[str, tuple[str, ...]], type] = {}


def register_structure(cls: _Class) -> _Class:
    """Registers a NamedTuple class, so that `packer` rebuilds nests of it as that class.

    It can be used as a decorator.

    Raises:
      ValueError: `cls` is not a NamedTuple class.
    """
    if not (isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")):
        raise ValueError(f"register_structure: got {cls!r}, expected a NamedTuple class")
    _NAMED_TUPLES[cls.__name__, tuple(cls._fields)] = cls
    return cls


register_structure(OneStep)
register_structure(Transition)
register_structure(Step)


def flatten(nest: Nest, leaf_type: type | None = None) -> tuple[list[Any], Structure]:
    """The leaves of `nest` and its structure.

    A node of the structure is None (a leaf), `["dict", keys, nodes]`, `["list", nodes]`, `["tuple", nodes]`
    or `["named", class name, fields, nodes]`. The structure is a list that holds the root node.

    Args:
      nest: the nest to flatten.
      leaf_type: the type that every leaf must have; None allows any.

    Raises:
      ValueError: The keys of a dict cannot be sorted, or a leaf is not of `leaf_type`.
    """
    leaves: list[Any] = []
    return leaves, [_flatten(nest, leaves, leaf_type)]


def _flatten(nest: Nest, leaves: list[Any], leaf_type: type | None) -> Any:
    if isinstance(nest, tuple):
        nodes = [_flatten(child, leaves, leaf_type) for child in nest]
        fields = getattr(nest, "_fields", None)
        return ["tuple", nodes] if fields is None else ["named", type(nest).__name__, list(fields), nodes]
    if isinstance(nest, dict):
        try:
            keys = sorted(nest)
        except TypeError as error:
            raise ValueError(
                f"nest: got a dict with keys {list(nest)}, expected keys that sort. Use strings."
            ) from error
        return ["dict", keys, [_flatten(nest[key], leaves, leaf_type) for key in keys]]
    if isinstance(nest, list):
        return ["list", [_flatten(child, leaves, leaf_type) for child in nest]]
    if leaf_type is not None and not isinstance(nest, leaf_type):
        raise ValueError(f"nest: got {type(nest).__name__} at a leaf, expected {leaf_type.__name__}")
    leaves.append(nest)
    return None


def packer(structure: Structure) -> Pack:
    """A function from a list of leaves to the nest that `structure` describes."""
    return unflattener(_template(structure[0]))


def _template(node: Any) -> Nest:
    """A nest with the structure of `node` whose leaves are None."""
    if node is None:
        return None
    kind, children = node[0], [_template(child) for child in node[-1]]
    if kind == "dict":
        return dict(zip(node[1], children, strict=True))
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "named":
        return _class_of(node)(*children)
    raise ValueError(f"structure: got a node of kind {kind!r}, expected dict, list, tuple or named")


def _class_of(node: Any) -> type:
    name, fields = str(node[1]), tuple(str(field) for field in node[2])
    return _NAMED_TUPLES.get((name, fields)) or _named_tuple(name, fields)


@functools.lru_cache(maxsize=1024)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type:
    return collections.namedtuple(name, fields)


def paths(structure: Structure) -> list[str]:
    """The path of each leaf, such as `"observation/pixels"`. The path of a single leaf is `ROOT`."""
    if structure[0] is None:
        return [ROOT]
    found: list[str] = []

    def walk(node: Any, prefix: str) -> None:
        if node is None:
            found.append(prefix)
            return
        labels = node[-2] if node[0] in ("dict", "named") else range(len(node[-1]))
        for label, child in zip(labels, node[-1], strict=True):
            walk(child, f"{prefix}/{label}" if prefix else str(label))

    walk(structure[0], "")
    return found


def freeze(structure: Any) -> Any:
    """A structure as nested tuples, which are hashable."""
    return tuple([freeze(node) for node in structure]) if isinstance(structure, (list, tuple)) else structure


def flattener(template: Nest) -> Callable[[Nest], list[Any]]:
    """A function that returns the leaves of a nest like `template`; several times faster than `tree.flatten`.

    The function raises KeyError, TypeError or ValueError for a nest with other keys or another length.
    """
    if not isinstance(template, _INNER):
        return lambda nest: [nest]
    keys = sorted(template) if isinstance(template, Mapping) else range(len(template))
    children = [
        (key, flattener(template[key]) if isinstance(template[key], _INNER) else None) for key in keys
    ]

    def leaves_of(nest: Nest) -> list[Any]:
        if len(nest) != len(children):
            raise ValueError(f"nest: got {len(nest)} children, expected {list(keys)}")
        leaves = []
        for key, flatten_child in children:
            if flatten_child is None:
                leaves.append(nest[key])
            else:
                leaves += flatten_child(nest[key])
        return leaves

    return leaves_of


def unflattener(template: Nest) -> Pack:
    """A function from leaves to a nest like `template`, with the same classes and order of keys.

    Mappings of other classes become dicts.
    """
    build, _ = _builder(template, 0)
    return build


def _builder(template: Nest, at: int) -> tuple[Pack, int]:
    """The function for the leaves from index `at` on, and the index of the first leaf after them."""
    if not isinstance(template, _INNER):
        return operator.itemgetter(at), at + 1
    keys = sorted(template) if isinstance(template, Mapping) else range(len(template))
    builds: dict[Any, Pack] = {}
    for key in keys:
        builds[key], at = _builder(template[key], at)
    if isinstance(template, Mapping):
        ordered = [(key, builds[key]) for key in template]
        return lambda leaves: {key: build(leaves) for key, build in ordered}, at
    cls, parts = type(template), list(builds.values())
    if hasattr(template, "_fields"):
        return lambda leaves: cls(*[build(leaves) for build in parts]), at
    return lambda leaves: cls([build(leaves) for build in parts]), at
