"""Calls of a node whose answers come late."""

import functools
from concurrent.futures import Future

from launch.handles import Client


class LateFuture(Future):
    """Is done after `polls` looks at it, or when it is waited for; the call is made then or before."""

    def __init__(self, call, polls, is_late):
        super().__init__()
        self._call, self._polls = call, polls
        if not is_late:
            self._make()

    def done(self):
        self._polls -= 1
        return self._polls < 0

    def result(self, timeout=None):
        if not super().done():
            self._make()
        return super().result(0)

    def _make(self):
        try:
            self.set_result(self._call())
        except Exception as error:
            self.set_exception(error)


def make_late_client(node, order):
    """A client of `node` whose futures have their results as late as `order`, a `random.Random`, wants."""

    def call(name, args, kwargs, timeout):
        return getattr(node, name)(*args, **kwargs)

    def submit(*called):
        return LateFuture(functools.partial(call, *called), order.randrange(40), order.random() < 0.5)

    return Client(0, call, submit)
