"""Objects by name: `module:object` for what can be imported, `name(argument=value)` for a call."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from framework.config_checks import RaisedAs, arguments, nearest

T = TypeVar("T")


def load_object(target: str) -> Any:
    """Imports `module:name`. Raises ImportError or AttributeError."""
    module, _, name = target.partition(":")
    if module.startswith("."):  # Python raises a TypeError for it.
        raise ImportError(f"{module!r} begins with a dot, expected the full name of a module")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def load_callable(target: str, got: str, expected: str) -> Callable[..., Any]:
    """Imports `module:name`. Raises ValueError, whose text begins with `got`, if it cannot be called."""
    with RaisedAs(
        ValueError, (ImportError, AttributeError, ValueError), f"{got}, which cannot be imported: ", "."
    ):
        found: Callable[..., Any] = load_object(target)
    if not callable(found):
        raise ValueError(f"{got}, expected {expected}.")
    return found


def target_of(function: Callable[..., Any]) -> str | None:
    """`module:name` of a class or function for other processes; None if it cannot be imported.

    For one of the main script, the module is the name of the script's file.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = spec.name if spec is not None else pathlib.Path(getattr(main, "__file__", "__main__")).stem
    of_instance = inspect.ismethod(function) and not isinstance(function.__self__, type)
    return None if module is None or "<" in name or of_instance else f"{module}:{name}"


def named(text: str, known: Mapping[str, Callable[..., T]], where: str) -> Callable[..., T]:
    """The function that `text` names, with the keyword arguments that it has.

    ```python
    named("FrameStack(num_frames=4)", {"FrameStack": FrameStack}, "wrappers")
    named("my_package.envs:Noise(scale=0.1)", {}, "wrappers")
    ```

    Args:
      text: a name in `known`, or `module:object`; after it, keyword arguments with literal values in
        parentheses.
      known: functions by name.
      where: name of the setting, for errors.

    Raises:
      ValueError: There is no such function, or the arguments are not literals.
    """
    got = f"{where}: got {text!r}"
    name, opened, call_text = text.partition("(")
    if ":" in name:
        function: Callable[..., T] = load_callable(name, got, "the name of a class or a function")
    elif name in known:
        function = known[name]
    else:
        raise ValueError(
            f"{got}, expected one of {', '.join(known)}, or module:object.{nearest(name, known)}"
        )
    if not opened:
        return function
    try:
        call: Any = ast.parse(f"call({call_text}", mode="eval").body
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if call.args or None in values:
            raise ValueError("it has values without a name")
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{got}, expected {name}(ARGUMENT=VALUE, ...) with literal values: {error}."
        ) from error
    with RaisedAs(ValueError, TypeError, f"{got}, but "):
        arguments(name, function, values)
    return functools.partial(function, **values)
