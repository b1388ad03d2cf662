"""Fields of configs against their annotations and against each other."""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pytest
import torch

from framework import config_checks
from launch import texts


class Kind(enum.Enum):
    FAR = "far"


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
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: pathlib.Path | None = None
    choice: Kind | None = None
    anything: Any = None

    def __post_init__(self):
        config_checks.types(self, may_be_infinite=("bound",))
        config_checks.ordered(self, "count", "bound")


UNKNOWN = object()
# By field, values as programs give them, and what they are in a file.
GOOD = {
    "count": [(np.int64(1), 1), (np.uint8(1), 1), (np.array(1), 1), (torch.tensor(1), 1), (np.float32(1), 1)],
    "rate": [(1, 1), (np.float32(0.5), 0.5), (np.int32(2), 2), (torch.tensor(0.5), 0.5)],
    "limit": [(None, None), (3, 3), (np.float64(3.5), 3.5)],
    "bound": [(math.inf, math.inf)],
    "switch": [(np.bool_(True), True), (torch.tensor(False), False)],
    "name": [(np.str_("b"), "b"), (pathlib.Path("a", "b"), "a/b"), (Kind.FAR, "far")],
    "sizes": [((1, np.int64(2)), (1, 2)), ([1, 2], (1, 2)), (np.array([1, 2]), (1, 2))],
    "names": [(["a"], ("a",)), (np.array(["a"]), ("a",)), (None, None)],
    "kind": [("far", "far"), (np.str_("far"), "far"), (Kind.FAR, "far")],
    "options": [({"a": np.int8(3), "b": [np.float32(0.5)]}, {"a": 3, "b": [0.5]})],
    "path": [("a/b", pathlib.Path("a/b")), (pathlib.Path("a"), pathlib.Path("a")), (None, None)],
    "choice": [("far", Kind.FAR), (Kind.FAR, Kind.FAR)],
    "anything": [(UNKNOWN, UNKNOWN), (Kind.FAR, Kind.FAR), (np.int64(1), 1), ([1], [1])],
}
WRONG = [
    ("count", "a whole number.", [1.5, math.inf, True, None, "1"]),
    ("count", "at most bound, which is 1.0.", [2]),
    ("kind", "one of 'near', 'far'.", ["c"]),
    ("kind", "one of 'near', 'far'. Did you mean 'far'?", ["fra"]),
    ("rate", "a finite number.", ["0.5", None, False, math.nan, -math.inf, np.float32(np.inf)]),
    ("limit", "a finite number or None.", [math.nan, "none"]),
    ("bound", "a number.", [math.nan]),
    ("switch", "True or False.", ["no", 1]),
    ("name", "a string.", [None]),
    ("sizes", "a tuple, each element of which is a whole number.", [64, (64, 0.5), (64, None), None]),
    ("names", "a tuple, each element of which is a string or None.", ["a"]),
]


@pytest.mark.parametrize(("field", "values"), GOOD.items())
def test_what_the_annotation_says_is_accepted_as_a_file_has_it(field, values):
    for value, expected in values:
        found = getattr(Config(**{field: value}), field)
        assert (repr(found), type(found)) == (repr(expected), type(expected))


@pytest.mark.parametrize(("field", "expected", "values"), WRONG)
def test_what_it_does_not_say_is_refused(field, expected, values):
    for value in values:
        text = re.escape(f"{field}: got {value!r}, expected {expected}")
        with pytest.raises(ValueError, match=text + "$"):
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
