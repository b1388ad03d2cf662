"""Counters that many nodes add to, and the exact budget of env steps.

Acme's tree of counters (``acme/utils/counting.py``): a child collects increments under its prefix, hands
them to its parent now and then, and answers with the counts of all::

    counter = Counter(max_steps=50_000)                   # the root, in a node of its own
    actor = Counter(counter, prefix="actor")              # or a client of that node
    actor.increment(steps=8, episodes=1)                  # {"env_steps": 8, "actor_episodes": 1, …}

The root also owns the budget. An actor asks for steps before it takes them, so that the actors of all
processes together stop at exactly ``max_steps``::

    granted = counter.grant("actor/0", 256)
    while granted:
        ...                                               # take ``granted`` env steps
        granted = counter.grant("actor/0", 256, spent=granted)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from framework.core import Saveable

Count = int | float


class Counter(Saveable[dict[str, Any]]):
    """Named counts, safe to use from any thread.

    Args:
      parent: a counter, or a client of one, that gets the increments; None makes this the root.
      prefix: put before every name handed to the parent, as ``prefix_name``. A parent that has a prefix of
        its own puts it before its children's names too, as in Acme: give prefixes to the leaves only.
      time_delta: seconds between two pushes to the parent; 0 pushes at every call, which is what the serial
        engine needs (no clock decides there).
      return_only_prefixed: answer with this counter's own names only.
      max_steps: the budget that ``grant`` hands out, counted under ``steps_key``; None is no limit.
      steps_key: the name that ``grant`` counts spent steps under.
      clock: seconds, for tests.
    """

    def __init__(
        self,
        parent: Any = None,
        prefix: str = "",
        time_delta: float = 1.0,
        return_only_prefixed: bool = False,
        *,
        max_steps: int | None = None,
        steps_key: str = "env_steps",
        clock: Callable[[], float] = time.monotonic,
    ):
        if max_steps is not None and max_steps < 0:
            raise ValueError(f"Counter: max_steps is {max_steps}; expected 0 or more, or None for no limit.")
        if max_steps is not None and parent is not None:
            raise ValueError("Counter: max_steps belongs to the root; a counter with a parent has no budget.")
        self._parent = parent
        self._prefix = prefix
        self._time_delta = time_delta
        self._return_only_prefixed = return_only_prefixed
        self._max_steps = max_steps
        self._steps_key = steps_key
        self._clock = clock
        self._changed = threading.Condition()
        self._push_lock = threading.Lock()  # one push at a time, so that an older answer never wins
        self._counts: dict[str, Count] = {}  # not yet with the parent
        self._cache: dict[str, Count] = {}  # the parent's last answer
        self._last_sync: float | None = None
        self._grants: dict[str, int] = {}
        self._strangers: set[str] | None = None  # who has settled since a restore; None before any
        self._interrupted = False

    def increment(self, **counts: Count) -> dict[str, Count]:
        """Adds to the named counts and returns all of them."""
        with self._changed:
            for name, value in counts.items():
                self._counts[name] = self._counts.get(name, 0) + value
            self._changed.notify_all()
        return self.get_counts()

    def get_counts(self) -> dict[str, Count]:
        """All counts as known here; the parent's part is at most ``time_delta`` seconds old."""
        if self._parent is not None and self._is_due():
            self.sync()
        with self._changed:
            counts = self._prefixed(self._counts)
            for name, value in self._cache.items():
                counts[name] = counts.get(name, 0) + value
        if self._return_only_prefixed and self._prefix:
            counts = {name: value for name, value in counts.items() if name.startswith(f"{self._prefix}_")}
        return counts

    def sync(self) -> None:
        """Hands everything collected to the parent now. Without a parent it does nothing."""
        if self._parent is None:
            return
        with self._push_lock:
            with self._changed:
                pushed, self._counts = self._counts, {}
            try:
                answer = self._parent.increment(**self._prefixed(pushed))
            except BaseException:
                with self._changed:  # nothing is lost: the next push takes them along
                    for name, value in pushed.items():
                        self._counts[name] = self._counts.get(name, 0) + value
                raise
            with self._changed:
                self._cache = dict(answer)
                self._last_sync = self._clock()
                self._changed.notify_all()

    def get_steps_key(self) -> str:
        """The name under which this counter's ``steps`` appear in ``get_counts()``."""
        return f"{self._prefix}_steps" if self._prefix else "steps"

    def grant(self, who: str, n: int, spent: int = 0, **counts: Count) -> int:
        """Hands ``who`` up to ``n`` more steps of the budget; 0 when all of it is spent or handed out.

        Args:
          who: the name of the actor, the same after a restart.
          n: steps asked for.
          spent: steps taken out of the last grant; they are added to the count of ``steps_key``. What ``who``
            was granted before and did not spend goes back to the budget first, so an actor that died in the
            middle of a grant simply asks again.
          counts: what else to add, as ``increment`` does; a call less for who reports at the same time.

        The first settlement of each ``who`` after `restore` is taken as it comes, up to the budget: the grant
        was made before the counter was restarted.

        The sum of all ``spent`` never exceeds ``max_steps``. ``grant(who, 0, spent)`` only settles.
        """
        if n < 0 or spent < 0:
            raise ValueError(f"grant({who!r}): n is {n} and spent is {spent}; expected both 0 or more.")
        if self._parent is not None:
            raise ValueError(f"grant({who!r}): only the root counter has the budget; ask the root.")
        with self._changed:
            held = self._grants.get(who, 0)
            if self._strangers is not None and who not in self._strangers:
                # Granted by an earlier life of this counter; what it has counted since is lost with it.
                self._strangers.add(who)
                if self._max_steps is not None:
                    spent = max(0, min(spent, self._left() + held))
            elif spent > held:
                raise ValueError(
                    f"grant({who!r}): spent {spent} steps but holds a grant of {held}; ask for steps before "
                    "taking them."
                )
            self._grants.pop(who, None)
            for name, value in counts.items():
                self._counts[name] = self._counts.get(name, 0) + value
            if spent:
                self._counts[self._steps_key] = self._counts.get(self._steps_key, 0) + spent
            granted = n if self._max_steps is None else max(0, min(n, self._left()))
            if granted:
                self._grants[who] = granted
            self._changed.notify_all()
            return granted

    def ungranted(self) -> int | None:
        """Steps of the budget that ``grant`` could still hand out; None without a budget."""
        with self._changed:
            return None if self._max_steps is None else self._left()

    def remaining(self) -> int | None:
        """Steps of the budget that nobody has taken yet, granted ones among them; None without a budget."""
        with self._changed:
            return None if self._max_steps is None else self._left() + sum(self._grants.values())

    def wait_for(self, name: str, value: Count, timeout: float | None = None) -> bool:
        """Blocks until the count ``name`` is at least ``value``.

        A child sees its parent's counts only as often as they are pushed: wait at the root.

        Returns:
          True if it is; False if ``timeout`` seconds went by (None: no limit) or ``interrupt`` was called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted or self._value(name) >= value, timeout)
            return self._value(name) >= value

    def interrupt(self) -> None:
        """Ends every ``wait_for``, now and from now on. For the stop handlers of a program."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def save(self) -> dict[str, Any]:
        """The counts. Grants are not part of it: what was not spent is free again after a restore."""
        with self._changed:
            return {"counts": dict(self._counts), "cache": dict(self._cache)}

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._changed:
            self._counts = dict(state["counts"])
            self._cache = dict(state["cache"])
            self._grants = {}
            self._strangers = set()
            self._last_sync = None  # the next call asks the parent
            self._changed.notify_all()

    def _is_due(self) -> bool:
        return self._last_sync is None or self._clock() - self._last_sync >= self._time_delta

    def _prefixed(self, counts: Mapping[str, Count]) -> dict[str, Count]:
        return (
            {f"{self._prefix}_{name}": value for name, value in counts.items()}
            if self._prefix
            else dict(counts)
        )

    def _value(self, name: str) -> Count:
        own = self._prefixed(self._counts)
        return own.get(name, 0) + self._cache.get(name, 0)

    def _left(self) -> int:
        assert self._max_steps is not None
        return int(self._max_steps - self._value(self._steps_key) - sum(self._grants.values()))
