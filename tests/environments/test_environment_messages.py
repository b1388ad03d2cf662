"""Messages between environments and their servers: specs as data, arrays as bytes, and what is malformed."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import sys

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
import tree
from hypothesis import given, settings

from framework import specs
from framework.environments.remote import environment_server, external_client
from framework.environments.remote.environment_server import UnreadableMessage
from framework.environments.remote.spec_data import parse_environment_spec, parse_spec

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from([np.bool_, np.uint8, np.int32, np.int64, np.float32, np.float64])
LEAVES = st.one_of(
    st.builds(specs.Array, SHAPES, DTYPES),
    st.builds(lambda shape: specs.BoundedArray(shape, np.float32, -1.5, np.inf), SHAPES),
    st.builds(lambda n: specs.BoundedArray((2,), np.int64, [0, -n], [n, 3]), st.integers(1, 1 << 40)),
    st.builds(specs.DiscreteArray, st.integers(1, 9)),
    st.builds(lambda frames: specs.StackedBoundedArray((frames, 2), np.uint8, 0, 255), st.integers(1, 4)),
)
NESTS = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.dictionaries(st.sampled_from(["b", "a", "dtype", "shape"]), children, min_size=1),
        st.lists(children, min_size=1, max_size=3).map(tuple),
    ),
    max_leaves=6,
)
PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(), st.text(), st.binary()
    ),
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.dictionaries(st.sampled_from(["shape", "dtype", "minimum", "num_values", "a"]), children),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=50)
@given(NESTS)
def test_specs_are_the_same_after_a_journey_as_data(spec):
    data = environment_server.describe_spec(spec)
    for arrived in (msgpack.unpackb(msgpack.packb(data)), json.loads(json.dumps(data))):
        parsed = parse_spec(arrived, "observation")
        tree.assert_same_structure(parsed, spec)
        assert tree.flatten(parsed) == tree.flatten(spec)
        assert [type(leaf) for leaf in tree.flatten(parsed)] == [type(leaf) for leaf in tree.flatten(spec)]


@settings(deadline=None, max_examples=50)
@given(NESTS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_arrays_are_the_same_after_a_journey_as_bytes(spec, num_envs, random):
    data = environment_server.describe_spec(spec)
    layout = environment_server.layout_of(data, num_envs)
    values = [
        np.frombuffer(random.randbytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
        for dtype, shape in layout
    ]
    frame = environment_server.pack("step", environment_server.to_bytes(values))
    kind, content = environment_server.unpack(frame)
    arrived = environment_server.from_bytes(content[0], layout)
    assert kind == "step" and [leaf.tobytes() for leaf in arrived] == [leaf.tobytes() for leaf in values]
    nest = environment_server.unflatten(data, iter(arrived))
    assert [id(leaf) for leaf in tree.flatten(nest)] == [id(leaf) for leaf in arrived]
    if sum(map(len, content[0])):
        content[0][int(np.argmax([len(leaf) for leaf in content[0]]))] += b"!"
        with pytest.raises(UnreadableMessage):
            environment_server.from_bytes(content[0], layout)


@settings(deadline=None, max_examples=100)
@given(PLAIN, st.binary(max_size=40))
def test_what_is_malformed_raises_its_own_error_only(plain, junk):
    layout = [(np.dtype(np.float32), (2, 4))]
    for read in (
        lambda: environment_server.unpack(junk),
        lambda: environment_server.unpack(msgpack.packb(plain, use_bin_type=True)),
        lambda: environment_server.from_bytes(plain, layout),
    ):
        with contextlib.suppress(UnreadableMessage):
            read()
    for parse in (lambda: parse_spec(plain, "observation"), lambda: parse_environment_spec(plain)):
        try:
            parse()
        except ValueError as error:
            assert "expected" in str(error)


@pytest.mark.parametrize(
    ("module", "may"),
    [(environment_server, {"msgpack", "numpy", "zmq"}), (external_client, set())],
    ids=["environment_server", "external_client"],
)
def test_files_to_copy_need_nothing_else_and_have_the_syntax_of_python_3_8(module, may):
    parsed = ast.parse(inspect.getsource(module), feature_version=(3, 8))
    names = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    assert names - set(sys.stdlib_module_names) == may
