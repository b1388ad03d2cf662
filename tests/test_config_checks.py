"""Fields of configs against their annotations and against each other."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

import numpy as np
import pytest

from framework import config_checks
from launch import texts


@dataclasses.dataclass(frozen=True)
class Config(config_checks.NamedFields):
    count: int = 1
    rate: float = 0.5
    limit: float | None = None
    bound: float = 1.0
    switch: bool = False
    name: str = "a"
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None
    kind: Literal["near", "far"] = "near"
    anything: Any = None

    def __post_init__(self):
        config_checks.types(self, may_be_infinite=("bound",))
        config_checks.ordered(self, "count", "bound")


GOOD = [
    ("count", np.int64(1)),
    ("count", np.uint8(1)),
    ("rate", 1),
    ("rate", np.float32(0.5)),
    ("rate", np.int32(2)),
    ("limit", None),
    ("limit", 3),
    ("bound", math.inf),
    ("switch", np.bool_(True)),
    ("sizes", (1, np.int64(2))),
    ("sizes", [1, 2]),
    ("names", ("a",)),
    ("names", None),
    ("kind", "far"),
    ("anything", object()),
]

WHOLES = "a tuple, each element of which is a whole number."
WRONG = [
    ("count", 1.5, "a whole number."),
    ("count", math.inf, "a whole number."),
    ("count", True, "a whole number."),
    ("count", None, "a whole number."),
    ("count", "1", "a whole number."),
    ("kind", "c", "one of 'near', 'far'."),
    ("kind", "fra", "one of 'near', 'far'. Did you mean 'far'?"),
    ("rate", "0.5", "a finite number."),
    ("rate", None, "a finite number."),
    ("rate", False, "a finite number."),
    ("rate", math.nan, "a finite number."),
    ("rate", -math.inf, "a finite number."),
    ("rate", np.float32(np.inf), "a finite number."),
    ("limit", math.nan, "a finite number or None."),
    ("limit", "none", "a finite number or None."),
    ("bound", math.nan, "a number."),
    ("switch", "no", "True or False."),
    ("switch", 1, "True or False."),
    ("name", None, "a string."),
    ("sizes", 64, WHOLES),
    ("sizes", (64, 0.5), WHOLES),
    ("sizes", (64, None), WHOLES),
    ("sizes", None, WHOLES),
    ("names", "a", "a tuple, each element of which is a string or None."),
    ("count", 2, "at most bound, which is 1.0."),
]


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_what_the_annotation_says_is_accepted(field, value):
    assert getattr(Config(**{field: value}), field) is value


@pytest.mark.parametrize(("field", "value", "expected"), WRONG)
def test_what_it_does_not_say_is_refused(field, value, expected):
    with pytest.raises(ValueError, match=re.escape(f"{field}: got {value!r}, expected {expected}") + "$"):
        Config(**{field: value})


@pytest.mark.parametrize("hundred", ["100", "1e2", "1_00", "100.0", 1e2, np.float32(100)], ids=repr)
def test_whole_numbers_as_users_write_them(hundred):
    hundred = texts.integer(hundred) if isinstance(hundred, str) else hundred
    config = Config(count=hundred, bound=1e3, sizes=[hundred, 1])
    assert config == Config(count=100, bound=1e3, sizes=[100, 1])
    assert type(config.count) is type(config.sizes[0]) is int and type(config.bound) is float


@pytest.mark.parametrize("text", ["1.5", "1e-1", "many", "inf", "nan", "1e999999999"])
def test_texts_that_are_no_whole_numbers(text):
    with pytest.raises(ValueError, match=f"got '{text}', expected a whole number such as"):
        texts.integer(text)


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(
        TypeError,
        match=r"^Config got an unexpected keyword argument 'swich'; it has count, .*mean 'switch'\?$",
    ):
        Config(count=2, swich=True)
    assert (
        config_checks.nearest("num_envs", ["num-actors", "envs-per-actor"])
        == " Did you mean 'envs-per-actor'?"
    )
    assert config_checks.nearest("gymansium", ["x"]) == ""


@pytest.mark.parametrize("value", [0, 1.5, math.nan, math.inf, None, "x", [1]], ids=repr)
def test_an_argument_that_is_not_whole_is_refused(value):
    expected = re.escape(f"steps: got {value!r}, expected a whole number of at least 1.")
    with pytest.raises(ValueError, match=expected):
        config_checks.whole_number("steps", value, 1)
