"""Nests: dicts, lists, tuples and named tuples with leaves of any other type.

The order of leaves is that of dm-tree: dicts by sorted keys, sequences by position:

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from framework.types import Nest, Step, Transition

# The path of the leaf in a nest that is a single leaf: names of columns must not be empty.
ROOT = "data"

Structure = list[Any]
Pack = Callable[[Sequence[Any]], Nest]
_Class = TypeVar("_Class", bound=type)

_NAMED_TUPLES: dict[tuple[str, tuple[str, ...]], type] = {}


def register(cls: _Class) -> _Class:
    """Registers a NamedTuple class, so that `packer` rebuilds nests of it as that class.

    It can be used as a decorator.

    Raises:
      ValueError: `cls` is not a NamedTuple class.
    """
    if not (isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")):
        raise ValueError(f"register: got {cls!r}, expected a NamedTuple class")
    _NAMED_TUPLES[cls.__name__, tuple(cls._fields)] = cls
    return cls


register(Transition)
register(Step)


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
    pack, _ = _packer(structure[0], 0)
    return pack


def _packer(node: Any, at: int) -> tuple[Pack, int]:
    if node is None:
        return lambda leaves: leaves[at], at + 1
    kind, nodes = node[0], node[-1]
    if nodes and all(child is None for child in nodes):  # the common flat case, without a call per leaf
        end = at + len(nodes)
        if kind == "named":
            make = _class_of(node)._make  # type: ignore[attr-defined]
            return lambda leaves: make(leaves[at:end]), end
        if kind == "dict":
            names = node[1]
            return lambda leaves: dict(zip(names, leaves[at:end], strict=True)), end
    packs: list[Pack] = []
    for child in nodes:
        pack, at = _packer(child, at)
        packs.append(pack)
    if kind == "dict":
        pairs = list(zip(node[1], packs, strict=True))
        return lambda leaves: {key: pack(leaves) for key, pack in pairs}, at
    if kind == "list":
        return lambda leaves: [pack(leaves) for pack in packs], at
    if kind == "tuple":
        return lambda leaves: tuple([pack(leaves) for pack in packs]), at
    if kind == "named":
        cls = _class_of(node)
        return lambda leaves: cls(*[pack(leaves) for pack in packs]), at
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


def thaw(structure: Any) -> Any:
    """The inverse of `freeze`."""
    return [thaw(node) for node in structure] if isinstance(structure, (list, tuple)) else structure


def flattener(template: Nest) -> Callable[[Nest], list[Any]]:
    """A function that returns the leaves of a nest like `template`; several times faster than `tree.flatten`.

    The function raises KeyError, TypeError or ValueError for a nest with other keys or another length.
    """
    visit = _visitor(template)

    def leaves_of(nest: Nest) -> list[Any]:
        leaves: list[Any] = []
        visit(nest, leaves)
        return leaves

    return leaves_of


def _visitor(template: Nest) -> Callable[[Nest, list[Any]], None]:
    if isinstance(template, (tuple, list)):
        visits = [_visitor(child) for child in template]

        def visit_sequence(nest: Nest, leaves: list[Any]) -> None:
            for visit, child in zip(visits, nest, strict=True):
                visit(child, leaves)

        return visit_sequence
    if isinstance(template, Mapping):
        keyed = [(key, _visitor(template[key])) for key in sorted(template)]

        def visit_mapping(nest: Nest, leaves: list[Any]) -> None:
            if len(nest) != len(keyed):
                raise ValueError(f"nest: got {len(nest)} keys, expected {[key for key, _ in keyed]}")
            for key, visit in keyed:
                visit(nest[key], leaves)

        return visit_mapping
    return lambda nest, leaves: leaves.append(nest)


def unflattener(template: Nest) -> Callable[[Sequence[Any]], Nest]:
    """A function from leaves to a nest like `template`, with the same classes and order of keys."""
    build = _builder(template)
    return lambda leaves: build(iter(leaves))


def _builder(template: Nest) -> Callable[[Iterator[Any]], Nest]:
    if isinstance(template, dict):
        keys = list(template)
        children = {key: _builder(template[key]) for key in sorted(template)}

        def build_dict(values: Iterator[Any]) -> Nest:
            built = {key: build(values) for key, build in children.items()}
            return {key: built[key] for key in keys}

        return build_dict
    if isinstance(template, (tuple, list)):
        parts = [_builder(child) for child in template]
        if hasattr(template, "_fields"):
            return lambda values: type(template)(*[part(values) for part in parts])
        return lambda values: type(template)([part(values) for part in parts])
    return next
