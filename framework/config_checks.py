"""Checks of the fields of a config, for its `__post_init__`, and of arguments. They raise `ValueError`.

```python
config_checks.at_least(self, 1, "batch_size", "hidden_sizes")
```

A field that is None passes every check. In a tuple or list, each element is checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import itertools
import math
import numbers
import os
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn

from launch import texts

if typing.TYPE_CHECKING:
    from typing_extensions import Self

# Names of one setting, here and in other libraries.
_SAME = tuple(
    frozenset(names.split())
    for names in (
        "envs_per_actor envs num_envs n_envs num_environments",
        "num_actors num_workers n_workers num_env_runners",
        "max_env_steps total_timesteps total_steps num_steps timesteps steps num_env_steps total_env_steps",
        "environment env env_id env_name",
        "environment_options env_kwargs env_config",
        "directory log_dir logdir output_dir save_dir run_dir",
        "learning_rate lr step_size",
        "max_replay_size buffer_size replay_size replay_capacity",
        "min_replay_size learning_starts warmup_steps",
        "unroll_length n_steps rollout_length num_unroll_steps",
        "discount gamma",
        "target_update_rate tau polyak",
        "clip clip_range clip_coef clip_param",
        "entropy_coefficient ent_coef entropy_cost entropy_coeff",
        "value_coefficient vf_coef value_cost vf_loss_coeff",
        "max_gradient_norm max_grad_norm grad_clip",
        "hidden_sizes net_arch hiddens layers",
        "epochs n_epochs update_epochs num_epochs",
        "evaluate_period eval_freq eval_interval evaluation_interval",
        "num_evaluation_episodes n_eval_episodes eval_episodes",
        "episodes num_episodes n_episodes",
        "checkpoint_period save_freq checkpoint_freq",
    )
)


def types(config: Any, may_be_infinite: Collection[str] = ()) -> None:
    """Makes the value of each field of a dataclass `plain`, and checks it. Floats must be finite.

    Checks int, float (takes an integer), bool, str, `Literal`, `tuple[int, ...]` and the like (takes a list),
    and unions of those and None. It does not check other annotations.

    Args:
      config: an instance of a dataclass.
      may_be_infinite: names of the float fields that may also be infinite.
    """
    config_class: Any = type(config)
    for field, hint in field_types(config_class).items():
        value = getattr(config, field)
        words, fits = _meaning(hint, field not in may_be_infinite)
        if not fits(made := plain(hint, value)):
            known = [choice for choice in typing.get_args(hint) if isinstance(choice, str)]
            raise ValueError(f"{field}: got {value!r}, expected {words}.{nearest(value, known)}")
        object.__setattr__(config, field, made)  # It may be frozen.


def plain(hint: Any, value: Any) -> Any:
    """`value`, of a program or of a file, as both can give it where the annotation is `hint`.

    Numbers and texts of numpy, and arrays and tensors of no dimension, become Python's; paths become texts.
    Depending on the annotation, a list or an array becomes a tuple, a whole float such as 1e5 an int, an
    enum its value, and a value a path or an enum. What has no such form stays as it is.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (UnionType, typing.Union):
        choices = ((part, plain(part, value)) for part in parts)
        return next((made for part, made in choices if _meaning(part, False)[1](made)), value)
    if origin is tuple and hasattr(value, "tolist") and getattr(value, "shape", ()) != ():
        value = value.tolist()
    if origin is tuple and isinstance(value, tuple | list):
        hints = itertools.repeat(parts[0]) if parts[1:] == (...,) else [*parts, *[Any] * len(value)]
        return tuple(map(plain, hints, value))
    if isinstance(value, dict):
        of = parts[1] if origin in (Mapping, dict) else Any
        return {name: plain(of, each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(Any, each) for each in value)
    if origin is None and isinstance(hint, type) and issubclass(hint, enum.Enum | PurePath):
        make: Callable[[Any], Any] = hint
        return make(value) if isinstance(value, str | int | float) else value
    if isinstance(value, enum.Enum) and (origin is Literal or hint in (bool, int, float, str)):
        value = value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist") and getattr(value, "shape", None) == ():
        value = value.tolist()
    return int(value) if hint is int and isinstance(value, float) and value.is_integer() else value


def at_least(config: Any, minimum: float, *fields: str) -> None:
    """Checks that no field is less than `minimum` or NaN."""
    _check(config, fields, lambda value: value >= minimum, f"at least {minimum}")


def above(config: Any, limit: float, *fields: str) -> None:
    """Checks that each field is more than `limit`."""
    _check(config, fields, lambda value: value > limit, f"more than {limit}")


def between(config: Any, low: float, high: float, *fields: str) -> None:
    """Checks that each field is more than `low` and less than `high`."""
    _check(config, fields, lambda value: low < value < high, f"more than {low} and less than {high}")


def fraction(config: Any, *fields: str) -> None:
    """Checks that each field is between 0 and 1."""
    _check(config, fields, lambda value: 0 <= value <= 1, "between 0 and 1")


def ordered(config: Any, less: str, more: str) -> None:
    """Checks that the field `less` is at most the field `more`."""
    most = getattr(config, more)
    _check(config, (less,), lambda value: value <= most, f"at most {more}, which is {most!r}")


def refuse(config: Any, field: str, text: str) -> NoReturn:
    """Raises ValueError for a field, with `text` after `FIELD: got VALUE`."""
    raise ValueError(f"{field}: got {getattr(config, field)!r}{text}")


def return_limits(config: Any) -> None:
    """Checks that the field `v_min` is less than the field `v_max`."""
    if not config.v_min < config.v_max:
        advice = "Set both to the smallest and the largest discounted return of the environment."
        refuse(config, "v_min", f", expected less than v_max, which is {config.v_max!r}. {advice}")


def one_of(config: Any, choices: Iterable[Any], *fields: str) -> None:
    """Checks that each field is one of `choices`."""
    known = sorted(choices)
    _check(config, fields, lambda value: value in known, f"one of {', '.join(map(repr, known))}")


def device(config: Any, *fields: str) -> None:
    """Checks that each field is the name of a torch device; this machine need not have it."""

    def is_device(value: Any) -> bool:
        if value == "cpu":
            return True  # An import of torch would take seconds.
        import torch

        each = flat_names(value).values() if isinstance(value, Mapping) else (value,)
        return all(bool(torch.device(name)) for name in each)

    _check(config, fields, is_device, "the name of a torch device, such as 'cpu' or 'cuda:0'")


def flat_names(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The values of nested mappings by names with dots, which the command line and files make nested."""
    made: dict[str, Any] = {}
    for name, value in nested.items():
        inner = {"": value} if not isinstance(value, Mapping) else flat_names(value)
        made.update({f"{name}.{rest}".rstrip("."): each for rest, each in inner.items()})
    return made


def names(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises ValueError if a name is not among `known`. The text has the nearest one that is."""
    for name in given:
        if name not in known:
            choices = f"it has {', '.join(known)}" if known else "it has no fields"
            raise ValueError(f"{where} has no field {name!r}; {choices}.{nearest(name, known)}")


def arguments(
    where: str, function: Callable[..., Any], given: Iterable[str], more: Sequence[str] = ()
) -> None:
    """Raises TypeError, as Python does, if `function` has no such keyword argument, with the nearest one.

    Args:
      where: what the function is, for the error.
      function: a function, or a class.
      given: names of keyword arguments.
      more: names that are allowed, too.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # A builtin, say.
        return
    known = [*(name for name in parameters if name != "self"), *more]
    for name in given:
        if name not in known and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            raise TypeError(
                f"{where} got an unexpected keyword argument {name!r}; it has {', '.join(known) or 'none'}."
                f"{nearest(name, known)}"
            )


def nearest(name: Any, known: Iterable[str]) -> str:
    """The end of an error message, ` Did you mean 'name'?`; empty if no known name is near.

    Upper and lower case, `-` and `_` are equal. Names of other libraries have a nearest one here, too.
    """
    known = list(known)
    plain = str(name).lower().replace("-", "_")
    same = {each for group in _SAME if plain in group for each in group}
    meant = [each for each in known if each.lower().replace("-", "_") in {plain, *same}]
    return texts.nearest(meant[0] if meant else name, known)


class RaisedAs:
    """Raises an expected error of a block as one of another kind, with more of a text.

    ```python
    with RaisedAs(RunError, (ValueError, TypeError), before=f"{path}: "):
        config = make_config()
    ```

    Args:
      kind: kind of the new error.
      expected: kinds of the errors. Others pass.
      before: text before the message of the error.
      after: text after it.
    """

    def __init__(self, kind: type[Exception], expected: Any, before: str = "", after: str = ""):
        self._kind, self._expected, self._before, self._after = kind, expected, before, after

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, self._expected):
            raise self._kind(f"{self._before}{error}{self._after}") from error


class NamedFields:
    """A base of dataclasses whose `TypeError` for an unknown field names the nearest one."""

    def __new__(cls, *values: Any, **fields: Any) -> Self:
        for name in fields:
            if name not in vars(cls).get("__dataclass_fields__", ()):
                arguments(cls.__name__, cls.__init__, [name])
        return super().__new__(cls)


def instance(name: str, value: Any, kind: type, example: str) -> None:
    """Raises `TypeError`, which says what to give, for an argument that is not an instance of `kind`."""
    if isinstance(value, kind):
        return
    what = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    raise TypeError(f"{name}: got {what}, expected an instance of {kind.__name__}. Give {example}.")


def whole_number(name: str, value: Any, least: int) -> int:
    """Returns an argument as an int. Raises `ValueError` if it is not whole, or less than `least`."""
    whole: int | None = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # It is no number, or not a finite one.
        whole = int(value)
    if whole is None or value != whole or value < least:
        raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {least}.")
    return whole


@functools.cache
def field_types(config_class: type) -> dict[str, Any]:
    """Returns the type of each field of a dataclass."""
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def _meaning(hint: Any, finite: bool) -> tuple[str, Callable[[Any], bool]]:
    """What an annotation takes: in words, and as a function of the value."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}", lambda value: value in parts
    if origin in (UnionType, typing.Union):
        choices = [_meaning(part, finite) for part in parts]
        return " or ".join(words for words, _ in choices), lambda value: any(
            fits(value) for _, fits in choices
        )
    if origin is tuple and parts[1:] == (...,):
        words, fits = _meaning(parts[0], finite)
        return (
            f"a tuple, each element of which is {words}",
            lambda value: isinstance(value, tuple | list) and all(map(fits, value)),
        )
    if origin is Mapping:
        words, fits = _meaning(parts[1], finite)
        return (
            f"names, each with {'a value' if parts[1] is Any else words}",
            lambda value: (
                isinstance(value, Mapping)
                and all(isinstance(name, str) and fits(of) for name, of in value.items())
            ),
        )
    if hint is float and finite:
        return "a finite number", lambda value: _is_number(value, numbers.Real) and math.isfinite(value)
    plain: dict[Any, tuple[str, Callable[[Any], bool]]] = {
        float: ("a number", lambda value: _is_number(value, numbers.Real) and not math.isnan(value)),
        int: ("a whole number", lambda value: _is_number(value, numbers.Integral)),
        bool: ("True or False", lambda value: isinstance(value, bool)),
        str: ("a string", lambda value: isinstance(value, str)),
        NoneType: ("None", lambda value: value is None),
    }
    return plain.get(hint, (str(hint), lambda value: True))


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check(config: Any, fields: Sequence[str], fits: Callable[[Any], Any], expected: str) -> None:
    for field in fields:
        value = getattr(config, field)
        items = value if isinstance(value, tuple | list) else (value,)
        try:
            good = all(item is None or fits(item) for item in items)
        except (TypeError, RuntimeError):  # not a number, or not a device
            good = False
        if not good:
            raise ValueError(f"{field}: got {value!r}, expected {expected}.")
