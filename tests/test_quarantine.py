"""The list of tests that may be tried again: each names an existing test, a date and a reason."""

from __future__ import annotations

import quarantine


def test_every_line_names_a_test_that_exists():
    for node in quarantine.read_quarantine(quarantine.PATH.read_text(encoding="utf-8")):
        file, _, test = node.partition("::")
        text = (quarantine.PATH.parent.parent / file).read_text(encoding="utf-8")
        assert f"def {test.rpartition('::')[2].partition('[')[0]}(" in text, f"{node} does not exist"
