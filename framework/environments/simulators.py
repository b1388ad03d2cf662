"""Each env has a simulator of its own: what factories return is refused if it was returned before."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from typing import Any

import dm_env

# Classes of environments that a wrapper can hold. Whoever makes one of them has imported its module.
_CLASSES = (
    ("gymnasium", "Env"),
    ("gymnasium.vector", "VectorEnv"),
    ("pettingzoo", "ParallelEnv"),
    ("pettingzoo", "AECEnv"),
    ("gym", "Env"),
)

# By id: a weak reference, the thread that took it and when. No environment lives longer because it is here.
_taken: dict[int, tuple[Any, int, int]] = {}
_made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_lock, _clock = threading.Lock(), itertools.count()


def now() -> int:
    """The time before a call of a factory, for `take`."""
    return next(_clock)


def take(name: str, environment: Any, since: int) -> None:
    """Takes what a factory returned, and every environment inside of it, for the caller alone.

    Closing does not give them back, since a closed simulator is no new one either.

    Args:
      name: the environment's name, for errors.
      environment: one environment or a batch, in any wrappers that hold theirs in an attribute.
      since: `now()` before the call. What this thread has taken since then, the factory itself has taken, by
        `environments.make`, for its caller.

    Raises:
      ValueError: One of them was taken before, in this process.
    """
    classes = (dm_env.Environment, *[kind for one in _CLASSES if (kind := _class(*one))])
    thread = threading.get_ident()
    with _lock:
        for key, held in _inside(name, environment, classes, ()).items():
            _, owner, when = _taken.get(key, (None, thread, since))
            if owner != thread or when < since:
                raise _shared(name, held)
            try:
                reference = weakref.ref(held, functools.partial(_forget, key))
            except TypeError:  # The class has __slots__ without __weakref__.
                continue
            _taken[key] = reference, thread, now()


def made(batch: Any) -> None:
    """Notes a batch of `environments.make`, which has taken what is inside: it can be taken as a whole."""
    if id(batch) not in _made:
        _taken.pop(id(batch), None)
        _made[id(batch)] = batch


def _forget(key: int, _: Any) -> None:
    _taken.pop(key, None)


def _class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _inside(name: str, environment: Any, classes: Any, around: tuple[int, ...]) -> dict[int, Any]:
    """The environment and those that it holds, by id; `around` are the ids of those that hold it."""
    found, around = {id(environment): environment}, (*around, id(environment))
    attributes = {} if id(environment) in _made else getattr(environment, "__dict__", {})
    for value in list(attributes.values()):
        several = isinstance(value, list | tuple)
        held: dict[int, Any] = {}
        for each in value if several else (value,):
            if isinstance(each, classes) and id(each) not in around:
                inner = _inside(name, each, classes, around)
                # One for each env: a list of them that are no envs may name one of them twice.
                if several and len(value) == attributes.get("num_envs"):
                    for again in inner.keys() & held.keys():
                        raise _shared(name, inner[again])
                held |= inner
        found |= held
    return found


def _shared(name: str, environment: Any) -> ValueError:
    return ValueError(
        f"{name}: got the same environment ({type(environment).__name__}) from two calls of the factory, "
        "expected a new one for each env. Make the environment, not only its wrappers, inside of the factory."
    )
