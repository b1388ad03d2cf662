"""How the code of nodes is pickled."""

import functools
import pickle

import launch as lp
from launch.engines.base import Leaf, Unit
from launch.engines.supervised import code


def test_modules_that_are_frozen_into_the_interpreter_are_never_pickled_by_value():
    assert code._importable("abc")


def test_a_cached_function_of_the_script_is_pickled_by_value():
    def double(x):
        return 2 * x

    double.__module__ = "__main__"  # As a script's own is.
    cached = functools.lru_cache(maxsize=3)(double)
    unit = Unit("main-0", "main", 0, (Leaf(lp.PyNode(print, cached), None),))
    (copy,) = pickle.loads(code.dumps(unit)).leaves[0].node._args
    assert copy(4) == 8 and copy.cache_parameters()["maxsize"] == 3
    assert copy is not cached
