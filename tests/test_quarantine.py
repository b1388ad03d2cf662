"""The list of tests that may be tried again: each names an existing test, a date and a reason."""

from __future__ import annotations

import pytest
import quarantine


def test_every_line_names_a_test_that_exists():
    for node in quarantine.read_quarantine(quarantine.PATH.read_text(encoding="utf-8")):
        file, _, test = node.partition("::")
        text = (quarantine.PATH.parent.parent / file).read_text(encoding="utf-8")
        assert f"def {test.rpartition('::')[2].partition('[')[0]}(" in text, f"{node} does not exist"


def test_a_line_says_which_test_since_when_and_why():
    text = "# comment\n\ntests/test_a.py::test_b[x] | 2026-11-22 | a race between two clocks\n"
    assert quarantine.read_quarantine(text) == {"tests/test_a.py::test_b[x]": "a race between two clocks"}


@pytest.mark.parametrize(
    "line",
    [
        "tests/test_a.py::test_b",
        "tests/test_a.py::test_b | 2026-11-22 |",
        "tests/test_a.py::test_b | soon | it fails",
    ],
    ids=["only a name", "no reason", "no date"],
)
def test_an_incomplete_line_is_an_error(line):
    with pytest.raises(ValueError):
        quarantine.read_quarantine(line)
