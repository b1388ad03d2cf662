"""Changes for the next release: their files, and what becomes of them in the changelog."""

import pathlib
import re
import runpy
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
CHANGES = runpy.run_path(str(ROOT / "changes" / "changes.py"))
LOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_file_of_a_change_names_its_kind_and_is_short():
    for file in (ROOT / "changes").glob("*.md"):
        assert file.suffixes in [[f".{kind}", ".md"] for kind in CHANGES["KINDS"]]
        assert len(file.read_text(encoding="utf-8").split()) <= 25


def test_changes_come_first_in_the_part_of_their_kind():
    log = "# Log\n\n## Unreleased\n\nText.\n\n### Added\n\nAgents\n\n- a\n\n### Fixed\n\n- b\n\n## 0.1.0\n"
    before, part, older = CHANGES["fold"](log, {"added": ["x"], "fixed": ["y", "z"], "removed": ["w"]})
    assert part == (
        "\nText.\n\n### Added\n\n- x\n\nAgents\n\n- a\n\n### Fixed\n\n- y\n- z\n- b\n\n### Removed\n\n- w\n"
    )
    assert (before, older) == ("# Log\n", "\n## 0.1.0\n")


def test_the_releases_that_are_tagged_are_those_of_the_changelog():
    named = dict(re.findall(r"^## (\d\S+) — (\S+)$", LOG, re.MULTILINE))
    tagged = dict(line.split() for line in (ROOT / "changes" / "releases.txt").read_text().splitlines())
    assert named.keys() == tagged.keys()
    for version, commit in tagged.items():
        show = ["git", "-C", ROOT, "show", "-s", "--format=%cs", commit]
        done = subprocess.run(show, capture_output=True, text=True)
        if done.returncode:
            pytest.skip("no repository with all commits")
        assert done.stdout.strip() == named[version]
