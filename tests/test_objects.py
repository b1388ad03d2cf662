"""Objects by name, as in settings."""

from __future__ import annotations

import re

import pytest

from framework import objects


def make(count=1):
    return count


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
