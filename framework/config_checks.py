"""Checks of configs' fields, for ``__post_init__``: an error says what came and what was expected.

::

    config_checks.at_least(self, 1, "batch_size", "hidden_sizes")

Fields that are None, switched off, pass every check; of a tuple or list each element is checked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal

import numpy as np


def types(config: Any, may_be_infinite: Collection[str] = ()) -> None:
    """ValueError if a field of the dataclass is not what its annotation says, or is a float but not finite.

    Checked annotations are int, float (takes an integer), bool, str, ``Literal``, ``tuple[int, ...]`` and the
    like (takes a list), and unions of those and None. Other fields are not checked. numpy's numbers are
    numbers.

    Args:
      config: an instance of a dataclass.
      may_be_infinite: names of fields that may be inf too.
    """
    config_class: Any = type(config)
    for field, hint in _hints(config_class).items():
        value = getattr(config, field)
        if not _has_type(value, hint, field not in may_be_infinite):
            raise ValueError(
                f"{field}: got {value!r}, expected {_in_words(hint, field not in may_be_infinite)}."
            )


def at_least(config: Any, minimum: float, *fields: str) -> None:
    """ValueError if one of ``fields`` is less than ``minimum``, or NaN."""
    _check(config, fields, lambda value: value >= minimum, f"at least {minimum}")


def above(config: Any, limit: float, *fields: str) -> None:
    """ValueError if one of ``fields`` is not more than ``limit``."""
    _check(config, fields, lambda value: value > limit, f"more than {limit}")


def fraction(config: Any, *fields: str) -> None:
    """ValueError if one of ``fields`` is not between 0 and 1."""
    _check(config, fields, lambda value: 0 <= value <= 1, "between 0 and 1")


def ordered(config: Any, less: str, more: str) -> None:
    """ValueError if the field ``less`` is more than the field ``more``."""
    most = getattr(config, more)
    _check(config, (less,), lambda value: value <= most, f"at most {more}, which is {most!r}")


def one_of(config: Any, choices: Iterable[Any], *fields: str) -> None:
    """ValueError if one of ``fields`` is none of ``choices``."""
    known = sorted(choices)
    _check(config, fields, lambda value: value in known, f"one of {', '.join(map(repr, known))}")


def device(config: Any, *fields: str) -> None:
    """ValueError if one of ``fields`` is not the name of a torch device, be it here or elsewhere."""
    _check(config, fields, is_device, "the name of a torch device, such as 'cpu' or 'cuda:0'")


def is_device(name: str) -> bool:
    """Whether torch knows this kind of device; there need not be one here."""
    import torch

    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


@functools.cache
def _hints(config_class: type) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def _has_type(value: Any, hint: Any, finite: bool) -> bool:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return value in parts
    if _is_union(hint):
        return any(_has_type(value, part, finite) for part in parts)
    if _is_tuple(hint):
        return isinstance(value, tuple | list) and all(_has_type(item, parts[0], finite) for item in value)
    if hint is float:
        return _is_number(value, numbers.Real) and (math.isfinite(value) if finite else not math.isnan(value))
    if hint is int:
        return _is_number(value, numbers.Integral)
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    return hint not in (str, NoneType) or isinstance(value, hint)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (UnionType, typing.Union)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[1:] == (...,)


def _in_words(hint: Any, finite: bool) -> str:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if _is_union(hint):
        return " or ".join(_in_words(part, finite) for part in parts)
    if _is_tuple(hint):
        return f"a tuple, each element of which is {_in_words(parts[0], finite)}"
    words = {
        float: "a finite number" if finite else "a number",
        int: "a whole number",
        bool: "True or False",
        str: "a string",
        NoneType: "None",
    }
    return words.get(hint, str(hint))


def _check(config: Any, fields: Sequence[str], fits: Callable[[Any], bool], expected: str) -> None:
    for field in fields:
        value = getattr(config, field)
        try:
            good = all(item is None or fits(item) for item in _elements(value))
        except TypeError:  # it is no number
            good = False
        if not good:
            raise ValueError(f"{field}: got {value!r}, expected {expected}.")


def _elements(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)
