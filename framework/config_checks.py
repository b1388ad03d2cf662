"""Checks of configs' fields, for ``__post_init__``: an error says what came and what was expected.

::

    config_checks.at_least(self, 1, "batch_size", "hidden_sizes")

Fields that are None, switched off, pass every check; of a tuple or list each element is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def at_least(config: Any, minimum: float, *fields: str) -> None:
    """ValueError if one of ``fields`` is less than ``minimum``, or NaN."""
    _check(config, fields, lambda value: value >= minimum, f"at least {minimum}")


def above(config: Any, limit: float, *fields: str) -> None:
    """ValueError if one of ``fields`` is not more than ``limit``."""
    _check(config, fields, lambda value: value > limit, f"more than {limit}")


def fraction(config: Any, *fields: str) -> None:
    """ValueError if one of ``fields`` is not between 0 and 1."""
    _check(config, fields, lambda value: 0 <= value <= 1, "between 0 and 1")


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


def _check(config: Any, fields: Sequence[str], fits: Callable[[Any], bool], expected: str) -> None:
    for field in fields:
        value = getattr(config, field)
        try:
            good = all(item is None or fits(item) for item in _elements(value))
        except TypeError:  # it is no number
            good = False
        if not good:
            raise ValueError(f"{field} is {value!r}; expected {expected}.")


def _elements(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)
