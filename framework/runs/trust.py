"""Which code the settings in a file may name.

A run's `config.yaml` names its agent, environment, networks and parts. Registered names (agents of installed
packages, suites of environments, the wrappers, observers and loggers of this package) run code that the user
has installed for this purpose. Any other name is `module:object`, and with its options it could be any
function of any module: the file may be somebody else's. So the user names the modules whose objects a file
may name (`--allow MODULE`, `allow=("module",)`), and none of them is imported before. What the preset of a
registered agent names for its config is the agent's own.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from framework.environments.suites import module_of
from framework.objects import load_object

_OBJECT = re.compile(r"[^\W\d][\w.]*:[^\W\d].*", re.DOTALL)
_NAMES = ("agent", "wrappers", "observers", "loggers")  # Settings whose texts are names.
# Variables of a node that choose devices and threads. Others, such as LD_PRELOAD, can load code.
_VARIABLES = re.compile(r"(CUDA_VISIBLE_DEVICES|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|MUJOCO_GL)\Z")


def check(settings: Mapping[str, Any], allow: Collection[str]) -> None:
    """Raises ValueError if `settings` name code that is neither registered nor of a module in `allow`.

    A module also allows the modules in it. Its objects must be defined in one of them: those that it has
    imported from elsewhere are the other module's.
    """
    refused = [each for each in named(settings) if not _is_in(each[2], allow)]
    if not refused:
        # Only now is something imported.
        for setting, text, module in named(settings):
            if setting in (*_NAMES, "environment", "networks_fn") and text.startswith(f"{module}:"):
                refused += _defined_elsewhere(setting, text, allow)
    if refused:
        found = ", ".join(f"{setting} {text!r}" for setting, text, _ in refused)
        modules = list(dict.fromkeys(module for _, _, module in refused))
        raise ValueError(
            f"got {found}, expected registered names, or objects of modules that you allow. It would run "
            f"code of {', '.join(modules)}. If you trust these settings with it, add "
            f"{flags(refused)}; in Python, allow={tuple(modules)!r}."
        )


def flags(names: Iterable[tuple[str, str, str]]) -> str:
    """The flags that allow what `named` yields."""
    return " ".join(dict.fromkeys(f"--allow {module}" for *_, module in names))


def module_in(text: str | None) -> list[str]:
    """The module that a name on the command line says, as a list; empty if it says none."""
    return [] if text is None or not _OBJECT.fullmatch(text) else [text.partition(":")[0]]


def named(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields the settings that are not registered names: the setting, its text, and the module."""
    for setting, value in settings.items():
        if setting == "environment":
            module = module_of(value) if isinstance(value, str) else None
            if module is not None:
                yield setting, value, module
        elif setting == "resources" and isinstance(value, Mapping):
            for group in value.values():
                variables = group.get("env") if isinstance(group, Mapping) else None
                for name in variables if isinstance(variables, Mapping) else ():
                    if not _VARIABLES.match(str(name)):
                        yield f"{setting}: env", str(name), f"env.{name}"
        elif setting == "networks_fn":
            if isinstance(value, str) and value:
                yield setting, value, value.partition(":")[0]
        else:
            for text in _texts(value):
                if setting == "loggers" and text.startswith("wandb(") and "settings" in text:
                    yield setting, text, "wandb"  # W&B's settings name programs that it starts.
                elif _OBJECT.fullmatch(text) or (setting in _NAMES and ":" in text.partition("(")[0]):
                    yield setting, text, text.partition(":")[0]


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a value of a file, at any depth."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one


def _is_in(module: str, allow: Collection[str]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in allow)


def _defined_elsewhere(setting: str, text: str, allow: Collection[str]) -> list[tuple[str, str, str]]:
    """The setting with the module that defines its object, if that is not in `allow`."""
    module, _, name = text.partition("(")[0].partition(":")
    try:
        for end in range(1, len(names := name.split(".")) + 1):
            found = load_object(f"{module}:{'.'.join(names[:end])}")
            if isinstance(found, types.ModuleType):
                return [(setting, text, found.__name__)]
    except (ImportError, AttributeError, ValueError):
        return []  # Who makes the object explains it.
    if not hasattr(found, "__qualname__"):
        return []  # An object that this module has made.
    home = getattr(found, "__module__", None) or "builtins"
    return [] if _is_in(home, allow) else [(setting, text, home)]
