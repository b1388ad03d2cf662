"""The counts of a program, and its budget of env steps.

An actor requests steps before it takes them, so that all actors together stop at exactly `max_steps`:

```python
granted = counter.grant("actor-0", 256)
while granted:
    ...                                               # take `granted` env steps
    granted = counter.grant("actor-0", 256, spent=granted)
```
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from framework.core import Saveable

Count = int | float
_STEPS = "env_steps"  # The count to which `grant` adds spent steps.


class Counter(Saveable[dict[str, Any]]):
    """Named counts, safe to use from any thread.

    Args:
      max_steps: the budget of env steps for `grant`. None is no limit.
    """

    def __init__(self, max_steps: int | None = None):
        if max_steps is not None and max_steps < 0:
            raise ValueError(f"max_steps: got {max_steps}, expected at least 0, or None for no limit.")
        self._max_steps = max_steps
        self._changed = threading.Condition()
        self._counts: dict[str, Count] = {}
        self._grants: dict[str, int] = {}
        self._settled: set[str] | None = None  # Actors that have reported since `restore`; None without one.
        self._interrupted = False

    def increment(self, **counts: Count) -> dict[str, Count]:
        """Adds to the named counts and returns all of them."""
        with self._changed:
            self._add(counts)
            return dict(self._counts)

    def get_counts(self) -> dict[str, Count]:
        """All counts."""
        with self._changed:
            return dict(self._counts)

    def grant(self, who: str, n: int, spent: int = 0, **counts: Count) -> int:
        """Grants `who` up to `n` more steps of the budget; 0 when all steps are spent or granted.

        The sum of all `spent` never exceeds `max_steps`. `grant(who, 0, spent)` only reports.

        Args:
          who: name of the actor, the same after a restart.
          n: number of requested steps.
          spent: number of steps taken from the last grant. The unspent rest of that grant returns to the
            budget, so an actor that died during a grant requests a new one. The first report of each `who`
            after `restore` is accepted without a grant, up to the budget, because the restarted counter does
            not know the grant.
          counts: further counts to add, as `increment` does.
        """
        if n < 0 or spent < 0:
            raise ValueError(f"grant({who!r}): got n={n} and spent={spent}, expected at least 0 for both.")
        with self._changed:
            held = self._grants.get(who, 0)
            if self._settled is not None and who not in self._settled:
                self._settled.add(who)
                spent = spent if self._max_steps is None else max(0, min(spent, self._left() + held))
            elif spent > held:
                raise ValueError(
                    f"grant({who!r}): spent {spent} steps but holds a grant of {held}; ask for steps before "
                    "taking them."
                )
            self._grants.pop(who, None)
            self._add({**counts, _STEPS: spent} if spent else counts)
            granted = n if self._max_steps is None else max(0, min(n, self._left()))
            if granted:
                self._grants[who] = granted
            return granted

    def ungranted(self) -> int | None:
        """Steps of the budget that are neither spent nor granted; None without a budget."""
        with self._changed:
            return None if self._max_steps is None else self._left()

    def remaining(self) -> int | None:
        """Steps of the budget that are not spent, including granted ones; None without a budget."""
        with self._changed:
            return None if self._max_steps is None else self._left() + sum(self._grants.values())

    def wait_for(self, name: str, value: Count, timeout: float | None = None) -> bool:
        """Blocks until the count `name` is at least `value`.

        Returns:
          True if it is; False after `timeout` seconds (None: no limit) or after `interrupt`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted or self._counts.get(name, 0) >= value, timeout)
            return self._counts.get(name, 0) >= value

    def interrupt(self) -> None:
        """Ends every current and future `wait_for`. For the stop handlers of a program."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def save(self) -> dict[str, Any]:
        """The counts. Grants are not saved: their unspent steps return to the budget after a restore."""
        return {"counts": self.get_counts()}

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._changed:
            self._counts = dict(state["counts"])
            self._grants, self._settled = {}, set()
            self._changed.notify_all()

    def _add(self, counts: Mapping[str, Count]) -> None:
        for name, value in counts.items():
            self._counts[name] = self._counts.get(name, 0) + value
        self._changed.notify_all()

    def _left(self) -> int:
        assert self._max_steps is not None
        return int(self._max_steps - self._counts.get(_STEPS, 0) - sum(self._grants.values()))
