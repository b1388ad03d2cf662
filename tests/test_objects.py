"""Objects by name, as in settings."""

from __future__ import annotations

import re

import pytest

from framework import objects


def make(count=1):
    return count


class Factory:
    def make(self):
        return self

    @classmethod
    def of_class(cls):
        return cls()


WRONG = {
    "a path": ("./lab:make", "cannot be imported: './lab' begins with a dot"),
    "a parenthesis that is not closed": ("make(", "expected make(ARGUMENT=VALUE, ...)"),
}


@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_texts_that_name_nothing_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(f"parts: got {text!r}") + ".*" + re.escape(message)):
        objects.named(text, {"make": make}, "parts")


@pytest.mark.parametrize("text, value", [("make", 1), ("make()", 1), ("make(count=2)", 2)])
def test_arguments_are_optional(text, value):
    assert objects.named(text, {"make": make}, "parts")() == value


TARGETS = {
    "a function": (make, f"{__name__}:make"),
    "a class": (Factory, f"{__name__}:Factory"),
    "a method of a class": (Factory.of_class, f"{__name__}:Factory.of_class"),
    "a method of an object": (Factory().make, None),
    "a lambda": (lambda: 1, None),
}


@pytest.mark.parametrize("function, target", TARGETS.values(), ids=TARGETS)
def test_what_can_be_imported_has_a_name(function, target):
    assert objects.target_of(function) == target
    assert target is None or objects.load_object(target) == function
