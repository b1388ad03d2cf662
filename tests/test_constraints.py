"""The versions in `constraints/` are what `setup.py` asks for, on each Python that it names.

The release suite installs from the files. What can be told without a network is told here.
"""

from __future__ import annotations

import pathlib
import runpy

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = {f"3.{path.stem[3:]}": path for path in sorted((ROOT / "constraints").glob("py3*.txt"))}


def pins(path: pathlib.Path) -> dict[str, Version]:
    """Name and version of each line."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found = {canonicalize_name(name): Version(version) for name, version in (x.split("==") for x in lines)}
    assert len(found) == len(lines), f"{path.name} names a package twice"
    return found


@pytest.fixture
def package(monkeypatch):
    """The arguments of `setup.py`."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    return given


def problems(requirements: list[str], pinned: dict[str, Version], python: str) -> list[str]:
    """The requirements that apply to `python` and are not pinned, or to a version that they exclude."""
    found = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": python}):
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement} has {version}")
    return found


@pytest.mark.parametrize("python", FILES)
def test_every_requirement_is_pinned_to_a_version_that_it_admits(package, python):
    extras = package["extras_require"]
    requirements = [*package["install_requires"], *extras["test"], *extras["docs"]]
    assert problems(requirements, pins(FILES[python]), python) == []


def test_every_python_that_the_package_names_has_a_file(package):
    named = {line.rpartition(" :: ")[2] for line in package["classifiers"] if ":: Python :: 3." in line}
    assert named <= FILES.keys()
    assert package["python_requires"] == f">={min(named, key=Version)}"
