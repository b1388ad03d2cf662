"""What messages, pages and `setup.py` say of the extras that some Pythons lack."""

import importlib.util
import pathlib
import re
import sys

import pytest
from packaging.markers import Marker

from framework import environments
from launch import extras

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHONS = [f"3.{minor}" for minor in (10, 11, 12, 13, 14)]
EXIST = {
    "dm-control": "3.10 3.11 3.12",
    "minigrid": "3.11 3.12 3.13 3.14",
    "envpool": "3.11 3.12 3.13 3.14",
    "reverb": "3.10 3.11",
    "deepmind": "3.10",
    "atari": " ".join(PYTHONS),
}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", EXIST)
def test_a_message_names_the_pythons_of_an_extra(monkeypatch, extra, python):
    monkeypatch.setattr(sys, "version_info", (*map(int, python.split(".")), 0))
    text, exists = extras.install(extra), python in EXIST[extra].split()
    assert text.startswith(f'pip install "repertory[{extra}]"')
    assert (f"this is Python {python}, which it does not support" in text) != exists
    assert (extras.pythons(extra) in text) == (", on Python" in text) or extra == "atari"
    if extra not in ("atari", "reverb", "deepmind"):  # pip itself says that it finds none of these two.
        assert Marker(extras.marker(extra)).evaluate({"python_version": python}) == exists


def test_what_needs_another_python_is_no_circle(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(
        ImportError, match=r"dm_control, which .* on Python 3.12 or older \(this is Python 3.13"
    ):
        environments.make("dm_control:cartpole/balance")


def test_pages_name_the_pythons_of_an_extra():
    named = set()
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            for extra in re.findall(r"repertory\[([\w-]+)\]", line):
                of, _, how = extras.pythons(extra).partition(" or ")
                sign = {"older": "≤ ", "newer": "≥ ", "": ""}[how]
                assert not of or f"Python {sign}{of}" in line, f"{page.name}: {line}"
                named.add(extra)
    assert named >= EXIST.keys() - {"atari"}
