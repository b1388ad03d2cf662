"""Texts from users and for them: numbers, names that are nearly right, and what a terminal may be shown."""

from __future__ import annotations

import contextlib
import decimal
import difflib
import math
import re
import signal
from collections.abc import Iterable

# The end of a line and the tab may stay. ESC begins a command; CR and what turns text around hide other text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def integer(text: str) -> int:
    """Reads an int as users write it: 100000, 100_000 or 1e5. Raises `ValueError` if it is not whole."""
    with contextlib.suppress(ValueError):
        return int(text)
    try:
        number = decimal.Decimal(text)  # Exact where a float is not, as for 1e23.
    except decimal.InvalidOperation:
        number = decimal.Decimal("nan")
    if not (number.is_finite() and abs(number.adjusted()) < 100 and number == int(number)):
        raise ValueError(f"got {text!r}, expected a whole number such as 100000, 100_000 or 1e5.")
    return int(number)


def rounded(value: float, decimals: int = 0) -> str:
    """Returns a number with these decimals, or as many as show two digits: `30,510`, `42`, `5.0`, `0.43`."""
    if value and math.isfinite(value):
        if abs(value) < 1e-6:
            return f"{value:.2g}"
        decimals = max(decimals, 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns the end of an error message, ` Did you mean 'name'?`; empty if no known name is near.

    Upper and lower case, `-` and `_` are equal.
    """
    plain = {each.lower().replace("-", "_"): each for each in known}
    close = difflib.get_close_matches(str(name).lower().replace("-", "_"), list(plain), 1)
    return f" Did you mean {plain[close[0]]!r}?" if close else ""


def check_known(name: str, given: Iterable[str], known: Iterable[str], what: str = "some of") -> None:
    """Raises `ValueError` if something given is not known. The text has the nearest name."""
    known = list(known)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{name}: got {unknown}, expected {what} {known}.{nearest(unknown[0], known)}")


def printable(text: str) -> str:
    r"""Returns `text` with its control characters as escapes such as `\x1b`.

    What comes from a file, a node or a peer may hold commands for the terminal, which must not obey them.
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def how_it_ended(code: int) -> str:
    """Returns what the exit code of a process says, such as `was killed by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}"
    names = [each.name for each in signal.Signals if each == -code]  # Few real-time signals have a name.
    return f"was killed by {names[0] if names else f'signal {-code}'}"


def why_killed(code: int) -> str:
    """Returns the end of a message on a process with this exit code; empty unless SIGKILL ended it."""
    if code != -signal.SIGKILL:
        return ""
    return " If no user sent it, the memory was full. Use a smaller replay, fewer envs, or fewer actors."
