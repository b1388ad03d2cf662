"""Nests: one order, structures that travel, and the fast forms against dm-tree."""

from __future__ import annotations

import collections
import json
import types

import numpy as np
import pytest
import tree
from hypothesis import given
from hypothesis import strategies as st

from framework import nest
from framework.types import Transition

Pair = collections.namedtuple("Pair", ["left", "right"])
nest.register_structure(Pair)

NESTS = st.recursive(
    st.integers(),
    lambda children: (
        st.dictionaries(st.sampled_from("abcd"), children, max_size=3)
        | st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.builds(Pair, children, children)
    ),
    max_leaves=12,
)


@given(NESTS)
def test_leaves_come_in_the_order_of_dm_tree_and_go_back(value):
    leaves, structure = nest.flatten(value)
    assert leaves == tree.flatten(value)
    packed = nest.packer(structure)(leaves)
    assert packed == value
    tree.assert_same_structure(packed, value)


@given(NESTS)
def test_a_structure_travels_as_json_and_hashes(value):
    leaves, structure = nest.flatten(value)
    assert nest.packer(json.loads(json.dumps(structure)))(leaves) == value
    frozen = nest.freeze(structure)
    assert hash(frozen) == hash(nest.freeze(nest.flatten(value)[1]))
    assert nest.packer(frozen)(leaves) == nest.packer(structure)(leaves)
    assert nest.paths(frozen) == nest.paths(structure)


@given(NESTS)
def test_paths_name_the_leaves(value):
    leaves, structure = nest.flatten(value)
    found = nest.paths(structure)
    expected = ["/".join(map(str, path)) or nest.ROOT for path, _ in tree.flatten_with_path(value)]
    assert found == expected
    assert len(set(found)) == len(leaves)
    assert all(found)


@given(NESTS)
def test_the_fast_forms_do_the_same(value):
    leaves = tree.flatten(value)
    assert nest.flattener(value)(value) == leaves
    built = nest.unflattener(value)(leaves)
    assert built == value
    tree.assert_same_structure(built, value)


@pytest.mark.parametrize(
    "other",
    [{"a": 1}, {"a": 1, "b": (1, 2), "c": 3}, {"a": 1, "x": (1, 2)}, {"a": 1, "b": (1,)}, 7],
    ids=["a key less", "a key more", "another key", "another length", "a leaf"],
)
def test_a_flattener_refuses_other_structures(other):
    leaves_of = nest.flattener({"a": 0, "b": (0, 0)})
    with pytest.raises((KeyError, TypeError, ValueError)):
        leaves_of(other)


def test_unflattener_keeps_the_order_of_keys():
    assert list(nest.unflattener({"b": 0, "a": 0})([1, 2])) == ["b", "a"]
    assert nest.unflattener({"b": 0, "a": 0})([1, 2]) == {"a": 1, "b": 2}


def test_the_fast_forms_take_mappings_of_any_class():
    value = types.MappingProxyType({"b": (1, 2), "a": 0})
    assert nest.flattener(value)(value) == [0, 1, 2]
    assert nest.unflattener(value)([0, 1, 2]) == {"b": (1, 2), "a": 0}


def test_known_named_tuples_come_back_as_their_class_and_others_as_one_alike():
    transition = Transition(*range(6))
    leaves, structure = nest.flatten(transition)
    assert type(nest.packer(structure)(leaves)) is Transition
    unknown = nest.packer([["named", "Elsewhere", ["x", "y"], [None, None]]])([1, 2])
    assert unknown == (1, 2)
    assert type(unknown).__name__ == "Elsewhere"
    assert unknown._fields == ("x", "y")


def test_wrong_leaves_and_keys_are_named():
    with pytest.raises(ValueError, match="got str at a leaf, expected ndarray"):
        nest.flatten({"a": np.zeros(1), "b": "text"}, np.ndarray)
    with pytest.raises(ValueError, match="keys that sort"):
        nest.flatten({1: 0, "a": 0})
    with pytest.raises(ValueError, match="expected a NamedTuple class"):
        nest.register_structure(dict)
    with pytest.raises(ValueError, match="kind 'set'"):
        nest.packer([["set", [None]]])
