"""How the code of nodes, of calls and of environments is pickled."""

import functools
import pickle

import pytest

from launch import pickling
from launch.rpc import wire


def test_modules_that_are_frozen_into_the_interpreter_are_never_pickled_by_value():
    assert pickling._importable("abc")


def counted():
    @functools.lru_cache(maxsize=3)
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    return factorial


def dispatched():
    @functools.singledispatch
    def factorial(n):
        return factorial(int(n))

    @factorial.register
    def _(n: int):
        return 1 if n < 2 else n * factorial(str(n - 1))

    return factorial


def methods():
    class Table:
        @functools.cached_property
        def factorial(self):
            return counted()

        @functools.singledispatchmethod
        def find(self, n):
            return self.factorial(n)

    return lambda n: Table().find(n)


@pytest.mark.parametrize("dumps", [pickling.dumps, lambda value: wire.encode(value)[0]], ids=["code", "call"])
@pytest.mark.parametrize("name", [__name__, "__main__"])
@pytest.mark.parametrize("make", [counted, dispatched, methods, lambda: functools.partial(counted())])
def test_a_function_that_no_other_process_finds_travels_behind_its_wrapper(make, name, dumps):
    wrapped = make()
    for each in filter(lambda each: hasattr(each, "__wrapped__"), (wrapped, getattr(wrapped, "func", None))):
        each.__wrapped__.__module__ = each.__module__ = name  # As in a script.
    copy = pickle.loads(dumps(wrapped))
    assert copy(4) == 24 and copy is not wrapped
    if make is counted:
        assert copy.cache_parameters()["maxsize"] == 3 and wrapped.cache_info().misses == 0


@functools.cache
def double(x):
    return 2 * x


def test_a_wrapper_that_other_processes_find_is_pickled_by_name():
    assert pickle.loads(pickling.dumps(double)) is double
