"""Clients of a node in this process, without an engine."""

import functools
from concurrent.futures import Future

from launch.handles import NodeClient


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


def _make_client(node, make_future):
    def call(name, args, kwargs, timeout):
        return getattr(node, name)(*args, **kwargs)

    return NodeClient(0, call, lambda *called: make_future(functools.partial(call, *called)))


def make_late_client(node, order):
    """A client of `node` whose futures have their results as late as `order`, a `random.Random`, wants."""
    return _make_client(node, lambda call: LateFuture(call, order.randrange(40), order.random() < 0.5))


def make_client(node):
    """A client that calls `node` at once, as on the serial engine."""
    return _make_client(node, lambda call: LateFuture(call, 0, is_late=False))
