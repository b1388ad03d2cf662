"""Names of a package that are imported when they are used.

The process of the counter and `repertory status` need no torch, which takes seconds to import and 190 MB.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, whose public names are in these modules."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, found)  # So that this is called once for each name.
        return found

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
