"""No name of ours shadows an attribute of a class of another package or of the standard library.

A newer Python may add private attributes to its classes, as 3.13 added `Thread._handle`, which no test on an
older one can know. Classes of the standard library with private state are therefore held, not inherited from.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pathlib
import pkgutil
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
    "threading.Event",  # users know the stop of a program as one
    "threading.local",
    "typing.Generic",
    "typing.NamedTuple",
    "typing.Protocol",
}

# What subclasses are there to define. A name that is defined as well and is not here shadows one.
OVERRIDDEN = {
    "cloudpickle.cloudpickle.Pickler": {"reducer_override"},
    "concurrent.futures._base.Future": {"result", "exception", "_condition"},
    "dm_env._environment.Environment": {
        *("reset", "step", "close"),
        *("action_spec", "observation_spec", "reward_spec", "discount_spec"),
    },
    "threading.Event": {"wait"},
    "torch.distributed.distributed_c10d.Store": {"wait", "clone", "set", "add", "check", "get"},
    "torch.nn.modules.linear.Linear": {"forward"},
    "torch.nn.modules.module.Module": {"forward"},
    "torch.optim.adam.Adam": {"step"},
    "torch.optim.optimizer.Optimizer": {"step", "state_dict", "load_state_dict", "add_param_group"},
    "yaml.composer.Composer": {"compose_node"},
    "yaml.constructor.BaseConstructor": {"construct_mapping"},
    "yaml.constructor.SafeConstructor": {"construct_mapping"},
    "yaml.representer.BaseRepresenter": {"ignore_aliases"},
    "yaml.representer.SafeRepresenter": {"ignore_aliases"},
    "yaml.resolver.BaseResolver": {"yaml_implicit_resolvers"},
    "yaml.resolver.Resolver": {"yaml_implicit_resolvers"},
}


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


@functools.cache
def names_in(module: str) -> dict[str, set[str]]:
    """The names that a module gives each of its classes: in the body, and as attributes of `self`."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):  # of C
        return {}
    names = {}
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef):
            found = names.setdefault(cls.name, set())
            for node in cls.body:
                for target in node.targets if isinstance(node, ast.Assign) else [node]:
                    target = target.target if isinstance(target, ast.AnnAssign) else target
                    found.add(getattr(target, "id", None) or getattr(target, "name", ""))
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return names


def names_of(cls: type) -> set[str]:
    found = names_in(cls.__module__).get(cls.__name__, set())
    return {name for name in found if name and not (name.startswith("__") and name.endswith("__"))}


def shadowed(cls: type) -> set[str]:
    """The attributes of foreign bases of `cls`, as `base.name`, to which `cls` gives another meaning."""
    found, mine = set(), names_of(cls)
    for base in cls.__mro__[1:]:
        if base.__module__.split(".")[0] in OURS or base is object:
            continue
        name = f"{base.__module__}.{base.__qualname__}"
        theirs = set(vars(base)) | set(getattr(base, "__annotations__", ())) | names_of(base)
        found |= {f"{name}.{each}" for each in (mine & theirs) - OVERRIDDEN.get(name, set())}
    return found


def test_classes_with_private_state_are_held_and_not_inherited_from():
    wrong = {
        f"{path.relative_to(ROOT)}: {found}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for found in inherited_state(path.read_text(encoding="utf-8"))
    }
    assert not wrong


def test_no_name_shadows_an_attribute_of_a_foreign_base():
    classes = []
    for package in map(importlib.import_module, OURS):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                loaded = importlib.import_module(module.name)
            except ImportError as error:  # of an optional package
                assert "not installed" in str(error), module.name
                continue
            classes += [each for each in vars(loaded).values() if inspect.isclass(each)]
    own = {each for each in classes if each.__module__.split(".")[0] in OURS}
    assert len(own) > 400
    assert not {f"{cls.__module__}.{cls.__name__}: {name}" for cls in own for name in shadowed(cls)}
