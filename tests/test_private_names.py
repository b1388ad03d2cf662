"""Agents and examples use the framework through its public names, and each class has a name of its own."""

from __future__ import annotations

import ast
import collections
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
OF_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # Public in spite of their names.


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_TUPLES


def is_own(node: ast.expr) -> bool:
    """Whether an attribute of `node` is one of the class around it."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def private_names(tree: ast.AST) -> set[str]:
    """The private names that a class defines, and those that it uses of `self`."""
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value)}
    return {name for name in defined | used if is_private(name)}


def parsed(*folders: str) -> dict[pathlib.Path, ast.Module]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def classes(trees: dict[pathlib.Path, ast.Module]) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in each_class(trees)}


def each_class(trees: dict[pathlib.Path, ast.Module]) -> list[ast.ClassDef]:
    return [node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]


def bases(kind: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """The names of all classes that `kind` derives from, as far as they are known."""
    direct = {ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in kind.bases} & known.keys()
    return direct.union(*(bases(known[name], known) for name in direct))


@pytest.fixture(scope="module")
def framework_files() -> dict[pathlib.Path, ast.Module]:
    return parsed("framework")


def test_agents_and_examples_use_no_private_names_of_the_framework(framework_files):
    files = parsed("agents", "examples")
    framework, users = classes(framework_files), classes(files)
    names = functools.cache(private_names)
    wrong = [
        f"{name} shares {sorted(shared)} with {base}"
        for name, kind in users.items()
        for base in bases(kind, {**framework, **users}) & framework.keys()
        if (shared := names(kind) & names(framework[base]))
    ]
    for path, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom):
                wrong += [f"{path.name}: imports {each.name}" for each in node.names if is_private(each.name)]
    assert wrong == []


def test_no_class_name_stands_twice(framework_files):
    names = [node.name for node in each_class({**framework_files, **parsed("launch")})]
    assert [name for name, count in collections.Counter(names).items() if count > 1] == []
