"""The wire: what goes in comes out, and nothing that a peer sends is trusted."""

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from framework.replay import errors, wire

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
)
arrays = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(),
        hnp.unsigned_integer_dtypes(),
        hnp.floating_dtypes(sizes=(16, 32, 64)),
        hnp.unicode_string_dtypes(max_len=5),
        hnp.byte_string_dtypes(max_len=5),
    ),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
)
messages = st.dictionaries(st.text(max_size=5), scalars | arrays | st.lists(arrays, max_size=3), max_size=5)


def same(a, b):
    if isinstance(a, np.ndarray):
        assert a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


@given(messages)
def test_round_trip(message):
    decoded = wire.decode([bytes(frame) for frame in wire.encode(message)])
    assert decoded.keys() == message.keys()
    for key in message:
        same(message[key], decoded[key])


def test_large_arrays_travel_in_frames_of_their_own_without_a_copy():
    array = np.arange(100_000)
    frames = wire.encode({"a": array, "b": np.arange(3)})
    assert len(frames) == 2 and len(frames[0]) < 200
    array[0] = 7
    assert wire.decode(frames)["a"][0] == 7


def test_strided_arrays():
    array = np.arange(40_000).reshape(200, 200)[::2, ::-1]
    travelled = wire.decode(wire.encode({"a": array}))["a"]
    assert travelled.flags.c_contiguous
    same(array.copy(), travelled)


@pytest.mark.parametrize("value", [object(), np.array([object()]), {1, 2}, 1 + 2j])
def test_what_does_not_travel(value):
    with pytest.raises(TypeError, match=r"expected numbers|serialize"):
        wire.encode({"a": value})


def ext(code, data):
    return [msgpack.packb({"a": msgpack.ExtType(code, data)})]


def array(kind, shape, where):
    return ext(1, msgpack.packb([kind, shape, where]))


MALFORMED = {
    "no frame": [],
    "empty": [b""],
    "no dict": [msgpack.packb([1])],
    "garbage": [b"\xc1\xff\x00"],
    "pickle": [b"\x80\x05K\x01."],
    "trailing": [msgpack.packb({}) + b"x"],
    "integer key": [msgpack.packb({1: 2})],
    "unknown extension": ext(9, b""),
    "empty array": ext(1, b""),
    "no list": ext(1, msgpack.packb(7)),
    "object dtype": array("|O", [], b"\0" * 8),
    "items of no bytes": array("|S0", [1 << 40], b""),
    "no such dtype": array("<f7", [], b"\0" * 7),
    "dtype that is no string": array(7, [], b"\0" * 8),
    "huge shape": array("<f8", [(1 << 63) - 1] * 2, b""),
    "negative shape": array("<f8", [-1], b""),
    "negative sizes": array("<f8", [-1, -1], b"\0" * 8),
    "fractional shape": array("<f8", [1.0], b"\0" * 8),
    "too little data": array("<f8", [2], b"\0" * 8),
    "frame zero": array("<f8", [], 0),
    "missing frame": array("<f8", [], 1),
    "frame with a name": array("<f8", [], "1"),
    "no shape": array("<f8", None, b"\0" * 8),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages_are_refused(name):
    with pytest.raises(wire.MalformedMessage):
        wire.decode(MALFORMED[name])


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_bytes_never_do_anything_else(frames):
    with contextlib.suppress(wire.MalformedMessage):
        assert isinstance(wire.decode(frames), dict)


@pytest.mark.parametrize(
    "error, kind",
    [
        (ValueError("v"), ValueError),
        (KeyError("k"), KeyError),
        (errors.DeadlineExceededError("d"), errors.DeadlineExceededError),
        (errors.ServerClosed("s"), errors.ServerClosed),
        (FileNotFoundError("f"), RuntimeError),
        (UnicodeDecodeError("utf8", b"", 0, 1, "u"), ValueError),
    ],
)
def test_errors_keep_their_type_and_text(error, kind):
    again = wire.unpack_error(wire.pack_error(error))
    assert type(again) is kind
    assert str(error.args[0]) in str(again)
