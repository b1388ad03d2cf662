"""How to install an extra. `setup.py` reads this file, which needs nothing but the standard library."""

import sys

# The first and the last minor version of Python 3 of the extras that some Pythons lack; None: no end.
_MINORS: dict[str, tuple[int | None, int | None]] = {
    "dm-control": (None, 12),  # labmaze, which it needs, has wheels up to 3.12.
    "minigrid": (11, None),
    "envpool": (11, None),  # The wheels for 3.10 are from 2022, for NumPy 1.
    "reverb": (None, 11),
    "deepmind": (10, 10),
}


def pythons(extra: str) -> str:
    """The Pythons on which an extra exists, such as `3.12 or older`; empty if it exists on all."""
    first, last = _MINORS.get(extra, (None, None))
    if first is None and last is None:
        return ""
    return f"3.{last}" if first == last else f"3.{last} or older" if first is None else f"3.{first} or newer"


def marker(extra: str) -> str:
    """The same as the marker of a requirement."""
    first, last = _MINORS[extra]
    return f'python_version >= "3.{first}"' if last is None else f'python_version < "3.{last + 1}"'


def install(extra: str) -> str:
    """The command that installs an extra, and the Pythons on which it does."""
    command, minor = f'pip install "repertory[{extra}]"', sys.version_info[1]
    first, last = _MINORS.get(extra, (None, None))
    if first is None and last is None:
        return command
    lacks = (first or minor) > minor or (last or minor) < minor
    here = f" (this is Python 3.{minor}, which it does not support)" if lacks else ""
    return f"{command}, on Python {pythons(extra)}{here}"
