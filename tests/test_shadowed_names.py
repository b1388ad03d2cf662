"""No name of ours shadows an attribute of a class of another package or of the standard library.

A newer Python may add private attributes to its classes, as 3.13 added `Thread._handle`, which no test on an
older one can know. Classes of the standard library with private state are therefore held, not inherited from.
"""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = ("framework", "agents", "launch")
FOLDERS = (*OURS, "benchmarks", "results", "examples")

# Classes of the standard library that may be inherited from. They have no private state of their own, or the
# subclass must be one of them for those who receive it.
STANDARD = {
    "_thread.RLock",  # only a compiled `with` cannot be interrupted
    "abc.ABC",
    "argparse.Action",  # argparse takes nothing else
    "concurrent.futures.Future",  # users know the answer of a call as one
    "enum.Enum",
    "multiprocessing.managers.BaseManager",  # its subclasses have the registered names
    "pathlib.PosixPath",  # users know the path of a picture as one
    "threading.Event",  # users know the stop of a program as one
    "threading.local",
    "typing.Generic",
    "typing.NamedTuple",
    "typing.Protocol",
}

# What subclasses are there to define. A name that is defined as well and is not here shadows one.


def bases_in(source: str) -> Iterator[tuple[str, str]]:
    """The classes in a module's source, nested ones too, and the full names of their bases."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                base = base.value if isinstance(base, ast.Subscript) else base  # Generic[T]
                root, *rest = ast.unparse(base).split(".")
                yield node.name, ".".join([names.get(root, root), *rest])


def inherited_state(source: str) -> list[str]:
    """The classes in `source` that inherit from a class of the standard library that has to be held."""
    return [
        f"{name}({base})"
        for name, base in bases_in(source)
        if base.split(".")[0] in sys.stdlib_module_names
        and base not in STANDARD
        and not base.startswith("collections.abc.")
    ]


def test_classes_with_private_state_are_held_and_not_inherited_from():
    wrong = {
        f"{path.relative_to(ROOT)}: {found}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for found in inherited_state(path.read_text(encoding="utf-8"))
    }
    assert not wrong
