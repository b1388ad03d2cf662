"""Names of a package that are imported when they are used.

The process of the counter and `repertory status` need no torch, which takes seconds to import and 190 MB.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, whose public names are those that it imports `as` themselves.

    It has these imports under `TYPE_CHECKING`, so that its file is the one list of them.
    """
    module: Any = sys.modules[package]
    nodes = ast.walk(ast.parse(module.__loader__.get_source(package)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.names[0].asname]
    modules = {node.names[0].name: str(node.module) for node in imports}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(modules[name]), name)
        setattr(module, name, found)  # This is called once for each name.
        return found

    return get, lambda: sorted({*vars(module), *modules})
