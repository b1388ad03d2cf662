"""How to install an extra. `setup.py` reads this file, which needs nothing but the standard library."""

import sys

# The first and the last Python of the extras that some Pythons lack; None where there is no end.
PYTHONS = {
    "dm-control": (None, (3, 12)),  # labmaze, which it needs, has wheels up to 3.12.
    "minigrid": ((3, 11), None),
    "envpool": ((3, 11), None),  # The wheels for 3.10 are from 2022, for NumPy 1.
    "reverb": (None, (3, 11)),
    "deepmind": ((3, 10), (3, 10)),
}


def pythons(extra: str) -> str:
    """The Pythons on which an extra exists, such as `3.12 or older`; empty if it exists on all."""
    first, last = PYTHONS.get(extra, (None, None))
    if first == last:
        return "{}.{}".format(*first) if first else ""
    return "{}.{} or newer".format(*first) if first else "{}.{} or older".format(*last)


def marker(extra: str) -> str:
    """The same as the marker of a requirement."""
    first, last = PYTHONS[extra]
    return 'python_version >= "{}.{}"'.format(*first) if first else f'python_version < "3.{last[1] + 1}"'


def install(extra: str) -> str:
    """The command that installs an extra, and the Pythons on which it does."""
    command, this = f'pip install "repertory[{extra}]"', sys.version_info[:2]
    first, last = PYTHONS.get(extra, (None, None))
    if first is last is None:
        return command
    lacks = (first or this) > this or (last or this) < this
    here = " (this is Python {}.{}, which it does not support)".format(*this) if lacks else ""
    return f"{command}, on Python {pythons(extra)}{here}"
