"""An extension of Griffe: `from a import x as x` makes `x` public, as type checkers read it."""

import ast
from typing import Any

import griffe


class PublicNames(griffe.Extension):
    def on_alias_instance(self, *, node: Any, alias: griffe.Alias, **kwargs: Any) -> None:
        if isinstance(node, ast.ImportFrom) and any(name.asname == alias.name for name in node.names):
            alias.public = alias.name == alias.target_path.rpartition(".")[2]
