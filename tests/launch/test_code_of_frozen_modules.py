"""Modules of the standard library that are frozen into the interpreter are never pickled by value."""

import abc

from launch.engines.supervised import code


def test_frozen_modules_are_importable():
    assert code._importable(abc)
