"""The codec of objects: exact round trips without pickle; no input crashes, hangs or allocates excessive memory."""

from __future__ import annotations

import collections
import enum
import math
import pickle
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unicoll.errors import DistError, PickleRefusedError
from unicoll.net.objects import object_codec, object_format


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and other.value == self.value


class Unpicklable:
    def __reduce__(self):
        raise OSError("no way")


def same(a, b) -> bool:
    """True if equal in type and value, for floats also in NaN and sign."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return bool(a == b)


def again(obj):
    """A round trip without pickle."""
    data = object_codec.dumps(obj, allow_pickle=False)
    assert data[0] == object_format.TYPED
    return object_codec.loads(data, allow_pickle=False)


dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(sizes=(16, 32, 64), endianness="?"),
    hnp.complex_number_dtypes(sizes=(64, 128), endianness="?"),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 600), max_value=1 << 600),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=100),
    st.binary(max_size=100),
)
hashables = st.recursive(
    leaves.filter(lambda leaf: leaf == leaf),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=5,
)
plain = st.recursive(
    st.one_of(leaves, arrays, st.binary(max_size=100).map(bytearray)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashables, inner, max_size=4),
        st.sets(hashables, max_size=4),
        st.frozensets(hashables, max_size=4),
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_objects_round_trip_without_pickle(obj):
    assert same(again(obj), obj)


@given(arrays)
def test_scalars_keep_their_type(array):
    for scalar in array.reshape(-1)[:3]:
        assert same(again(scalar), scalar)


NUMBERS = [0, -1, 255, -256, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, 1 << 511, 1 << 512, -(10**400)]
FLOATS = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, sys.float_info.max]
SIMPLE = [
    {"step": 3, "loss": 0.25, "name": "rank", "done": False, "shape": [2, 3], "none": None},
    [],
    {},
    [[], {}, [{"a": [1.0, -0.0, 5e-324, sys.float_info.max, math.inf, -math.inf]}]],
    [2**63 - 1, -(2**63), True, 1, 1.0],
    ["", '\0\n"\\/\x7f\u2028', "\ud800", "\ud83d\ude00", "\U0001f600", "é" * 63],
    list(range(5000)),
    NUMBERS,
    [*FLOATS, *(complex(x, -x) for x in FLOATS)],
]


@pytest.mark.parametrize("obj", SIMPLE, ids=range(len(SIMPLE)))
def test_objects_come_back_exactly(obj):
    assert same(again(obj), obj)
    assert same(object_codec.loads(object_codec.dumps(obj, True), True), obj)


def test_strided_arrays_arrive_contiguous_and_writable():
    base = np.arange(24.0).reshape(4, 6)
    base.flags.writeable = False
    for view in (base[::2, ::3], base.T, base[::-1], np.broadcast_to(np.float32(3), (2, 2))):
        result = again(view)
        np.testing.assert_array_equal(result, view)
        assert result.flags.c_contiguous
        assert result.flags.writeable


@pytest.mark.parametrize(
    "obj",
    [
        Colour.RED,
        Point(1, 2),
        collections.OrderedDict(a=1),
        collections.defaultdict(int, a=1),
        collections.Counter("aab"),
        Plain(3),
        [1, {"deep": (Plain(4),)}],
        range(4),
        Ellipsis,
        np.array(["a", "bc"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([None, 1], dtype=object),
        np.longdouble(1.5),
        np.array([1.5], np.longdouble),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_other_objects_are_pickled_or_refused(obj):
    data = object_codec.dumps(obj, allow_pickle=True)
    assert data[0] == object_format.PICKLED
    result = object_codec.loads(data, allow_pickle=True)
    assert type(result) is type(obj)
    np.testing.assert_equal(np.asarray(result, object), np.asarray(obj, object))
    with pytest.raises(PickleRefusedError):
        object_codec.dumps(obj, allow_pickle=False)
    with pytest.raises(PickleRefusedError, match="UNICOLL_SECRET"):
        object_codec.loads(data, allow_pickle=False)


def test_errors_of_pickles():
    truncated = bytes((object_format.PICKLED,)) + pickle.dumps(1)[:-1]
    for call, message in (
        (
            lambda: object_codec.dumps({"a": [Plain(1)]}, False),
            r"test_codec\.Plain can be sent only by pickle.*SECRET",
        ),
        (lambda: object_codec.dumps(np.array([None]), False), "array of dtype object"),
        (lambda: object_codec.dumps(Unpicklable(), True), r"cannot pickle .*Unpicklable: OSError: no way"),
        (lambda: object_codec.dumps(lambda: None, True), "cannot pickle"),
        (lambda: object_codec.loads(truncated, True), "cannot unpickle"),
    ):
        with pytest.raises(DistError, match=message) as caught:
            call()
        assert isinstance(caught.value, PickleRefusedError) or caught.value.__cause__ is not None


def test_shared_values_stay_shared():
    inner, text, array = [1], "x" * 1000, np.zeros(3)
    pair = (inner, text)
    result = again({"a": inner, "b": [inner, pair, pair], "c": text, "d": (array, array)})
    assert result["a"] is result["b"][0]
    assert result["b"][1] is result["b"][2]
    assert result["b"][1][0] is result["a"]
    assert result["b"][1][1] is result["c"]
    assert result["d"][0] is result["d"][1]
    assert len(object_codec.dumps([text] * 1000, allow_pickle=False)) < 12_000
    doubled: tuple = ()
    for _ in range(60):
        doubled = (doubled, doubled)
    assert len(object_codec.dumps(doubled, allow_pickle=False)) < 60 * 40


def test_cycles():
    loop: list = [1]
    loop.append({"self": loop})
    result = again(loop)
    assert result[1]["self"] is result

    holder: list = []
    through_tuple = (holder,)
    holder.append(through_tuple)
    result = object_codec.loads(object_codec.dumps(through_tuple, allow_pickle=True), allow_pickle=True)
    assert result[0][0] is result
    with pytest.raises(PickleRefusedError, match="a tuple that contains itself"):
        object_codec.dumps(through_tuple, allow_pickle=False)


def test_keys_have_no_references_to_containers():
    key = ("a", ("b",))
    assert again([key, {key: 1}, {key}, frozenset([key])]) == [key, {key: 1}, {key}, frozenset([key])]
    data = bytearray([object_format.TYPED])
    data += b"l" + struct.pack("<Q", 2)  # a list of a tuple, and of a dict whose key refers to the tuple
    data += b"t" + struct.pack("<Q", 0)
    data += b"d" + struct.pack("<Q", 1) + b"r" + struct.pack("<Q", 1) + b"N"
    with pytest.raises(DistError, match="reference to a container inside a key"):
        object_codec.loads(data, allow_pickle=False)


def nested(levels: int) -> list:
    obj: list = []
    for _ in range(levels - 1):
        obj = [obj]
    return obj


def test_nesting_is_bounded():
    assert again(nested(object_format.MAX_DEPTH)) == nested(object_format.MAX_DEPTH)
    deep = nested(object_format.MAX_DEPTH + 1)
    assert object_codec.loads(object_codec.dumps(deep, allow_pickle=True), allow_pickle=True) == deep
    with pytest.raises(PickleRefusedError, match="levels deep"):
        object_codec.dumps(deep, allow_pickle=False)
    too_deep = bytes((object_format.TYPED,)) + (b"l" + struct.pack("<Q", 1)) * 100_000 + b"N"
    with pytest.raises(DistError, match="levels deep"):
        object_codec.loads(too_deep, allow_pickle=True)
    with pytest.raises(DistError, match="cannot pickle list: RecursionError"):
        object_codec.dumps(nested(100_000), allow_pickle=True)


HUGE = struct.pack("<Q", (1 << 64) - 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\0", "unknown format 0"),
        (b"\1", "1 bytes expected, 0 left"),
        (b"\1?", "unknown tag"),
        (b"\1NN", "1 bytes too many"),
        (b"\1i123", "8 bytes expected, 3 left"),
        (b"\1b" + HUGE, "bytes expected, 0 left"),
        (b"\1B" + HUGE + b"abc", "bytes expected, 3 left"),
        (b"\1s" + struct.pack("<Q", 1) + b"\xff", "malformed"),
        (b"\1l" + HUGE + b"N", "items expected"),
        (b"\1t" + HUGE + b"N", "items expected"),
        (b"\1d" + HUGE + b"N", "items expected"),
        (b"\1d" + struct.pack("<Q", 2) + b"TNTN", "twice"),
        (b"\1S" + struct.pack("<Q", 2) + b"NN", "twice"),
        (b"\1d" + struct.pack("<Q", 1) + b"l" + struct.pack("<Q", 0) + b"N", "unhashable"),
        (b"\1r" + struct.pack("<Q", 0), "reference to value 0 of 0"),
        (b"\1a\3<f8\1" + HUGE, "bytes expected"),
        (b"\1a\3<f8\2" + HUGE + struct.pack("<Q", 0), "malformed"),
        (b"\1a\3<f8\xff" + struct.pack("<Q", 0) * 255, "malformed"),
        (b"\1a\3|O8\1" + struct.pack("<Q", 0), "dtype"),
        (b"\1a\3<f3\1" + struct.pack("<Q", 0), "dtype|data type"),
        (b"\1a\3<U4\1" + struct.pack("<Q", 1) + b"\xff" * 16, "dtype"),
        (b"\1a\4<M8[\1" + struct.pack("<Q", 0), "dtype"),
        (b"\1n\3|b1\2", "neither 0 nor 1"),
        (b"\1n\4<f16" + b"\0" * 16, "dtype"),
        (b"\3", "unknown format 3"),
    ],
)
def test_malformed_data(data, message):
    with pytest.raises(DistError, match=message):
        object_codec.loads(data, allow_pickle=False)


@given(plain)
@settings(max_examples=50)
def test_every_truncation_is_refused(obj):
    """Other damage: tests/faults/test_fuzz.py."""
    data = object_codec.dumps(obj, allow_pickle=False)
    for end in range(0, len(data), max(1, len(data) // 50)):
        with pytest.raises(DistError):
            object_codec.loads(data[:end], allow_pickle=False)


def test_any_buffer_can_be_read():
    data = object_codec.dumps({"a": np.arange(3)}, allow_pickle=False)
    for form in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8).data):
        assert object_codec.loads(form, allow_pickle=False)["a"].tolist() == [0, 1, 2]
    with pytest.raises(DistError, match="empty"):
        object_codec.loads(np.empty(0, np.uint8).data, allow_pickle=False)
