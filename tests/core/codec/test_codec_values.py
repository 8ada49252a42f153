"""Values load exactly as they were saved: class by class, bit by bit, also where `==` does not show it."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime as dt
import io
import math
import pathlib
import string
import struct
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt.codec import EncodedValue, decode, encode, leaf_digests, pack, unpack
from megackpt.codec.encoder import KINDS
from megackpt.codec.pickled import KINDS as KINDS_OF_PICKLED
from megackpt.errors import FormatError
from megackpt.testing.identical import difference
from tests.support.codec import TORCH_DTYPES, round_trip
from tests.support.effort import few


@pytest.mark.parametrize(
    "bits", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF]
)
def test_nan_payloads_survive(bits: int) -> None:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    loaded = round_trip([value, complex(value, 1.0)])
    assert difference(loaded, [value, complex(value, 1.0)]) is None


def test_huge_integers_survive_pythons_limit_on_decimal_digits() -> None:
    assert round_trip([1 << 100_000, -(1 << 100_000)]) == [1 << 100_000, -(1 << 100_000)]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_bit_of_every_dtype_survives(dtype: torch.dtype) -> None:
    raw_bytes = torch.arange(256, dtype=torch.uint8).repeat(dtype.itemsize)
    if dtype is torch.bool:
        raw_bytes %= 2
    every = raw_bytes.view(dtype)  # all NaNs among them
    value = [
        every,
        every.reshape(16, -1).t()[::3],
        every[3],
        every[:0].reshape(0, 5),
        every[5].reshape(1, 1, 1),
        every[::200][:1],  # torch calls the strides of one element, or none, contiguous though they are not
        every[::2][:0],
    ]
    assert difference(round_trip(value), value) is None


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4)[:, ::-2],
        np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
        np.broadcast_to(np.float32(7), (3, 2)),
        np.array(5),
        np.zeros((0, 3), np.uint32),
        np.zeros((2, 0), ">i8"),
        np.array(["", "añ", "xyz\0"]),
        np.array([b"", b"ab"]),
        np.array([1, 2**62], "m8[us]"),
        np.array(["NaT", "2024-01-01"], "M8[25s]"),
        np.array([1 + 2j], np.complex64),
        np.array([1, 2], np.longdouble),
        np.array([True, False]),
        np.arange(3, dtype=">u2"),
    ],
    ids=lambda array: f"{array.dtype.str}-{array.shape}",
)
def test_numpy_arrays_survive(array: np.ndarray) -> None:
    array.flags.writeable = False
    loaded = round_trip(array)
    assert difference(loaded, array) is None
    assert loaded.flags.writeable


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.int8(-1), np.uint64(2**64 - 1), np.float64(0.1), np.float16(np.nan), np.longdouble(1) / 3),
        *(
            np.complex128(1j),
            np.datetime64("2024-01-01T00", "h"),
            np.array(-(2**63)).view("M8")[()],  # NaT without a unit, which numpy 2.5 warns of in other ways
            np.timedelta64(5, "D"),
        ),
        *(np.str_(""), np.str_("a\0"), np.bytes_(b"a\0")),
    ],
    ids=repr,
)
def test_numpy_scalars_survive(scalar: np.generic) -> None:
    assert difference(round_trip({"x": scalar}), {"x": scalar}) is None


def test_conjugate_and_negative_views_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    loaded = round_trip([z.conj(), z.conj().imag])
    assert loaded[0].tolist() == [1 - 2j, 3 + 4j]
    assert loaded[1].tolist() == [-2.0, 4.0]


def test_a_generator_continues_where_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    loaded = round_trip({"rng": generator})["rng"]
    assert torch.equal(torch.rand(7, generator=loaded), torch.rand(7, generator=generator))


def test_a_stream_keeps_its_position() -> None:
    stream = io.BytesIO(b"abcdef")
    stream.seek(4)
    assert round_trip(stream).read() == b"ef"


@pytest.mark.parametrize(
    "value",
    [
        datetime(2024, 5, 17, 8, 0, 0, 7, timezone(timedelta(hours=-3), "é"), fold=1),
        datetime(1, 1, 1, tzinfo=timezone.utc),
        time(23, 59, 59, 999999, timezone(timedelta(seconds=1))),
        timezone(timedelta(0), "UTC"),
        Path("/a/b"),
        PureWindowsPath("C:\\a"),
        Decimal("sNaN123"),
        Decimal("-0E-99"),
        Fraction(-(10**40), 3),
        range(10**30, 0, -(10**29)),
        slice("a", (1, 2), 2.5),
        {1.5: 0, True: 1, None: 2, (1, ("a", b"b")): 3, b"b": 4, "s": 5, Path("p"): 6, 2**70: 7},
        {math.nan: 1},
        collections.defaultdict(dict, {1: {}}),
        collections.Counter({"a": -1, "b": 0}),
        collections.deque(maxlen=0),
        SimpleNamespace(**{"not an identifier": 1, "$x": 2}),
        torch.float8_e5m2,
        torch.qint8,
    ],
    ids=repr,
)
def test_values_of_the_standard_library_survive(value: object) -> None:
    assert difference(round_trip({"x": value}), {"x": value}) is None


def test_a_loaded_default_dict_still_makes_defaults() -> None:
    assert round_trip(collections.defaultdict(list))["new"] == []


NUMPY_DTYPES = [
    "?",
    "i1",
    ">i2",
    "<u4",
    "i8",
    "f2",
    ">f4",
    "f8",
    "c8",
    ">c16",
    "M8[ns]",
    "m8[s]",
    "S3",
    "U2",
    ">U1",
]

shapes = st.lists(st.integers(0, 4), max_size=3)
offsets = st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23))
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
zones = st.none() | st.builds(dt.timezone, offsets) | st.builds(dt.timezone, offsets, text)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(shapes)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw_bytes = torch.frombuffer(
        bytearray(draw(st.binary(min_size=count, max_size=count)) or b"\0"), dtype=torch.uint8
    )
    if dtype is torch.bool:
        raw_bytes = raw_bytes % 2
    tensor = raw_bytes[:count].clone().view(dtype).reshape(shape)
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)[:: draw(st.integers(1, 3))]
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(shapes)
    if dtype.kind == "U":  # not every four bytes are a character
        flat = np.array(draw(st.lists(text, min_size=1, max_size=8)), dtype=dtype)
        array = np.resize(flat, shape)
    else:
        count = int(np.prod(shape, dtype=int)) * dtype.itemsize
        data = draw(st.binary(min_size=count, max_size=count))
        data = bytes(byte % 2 for byte in data) if dtype.kind == "b" else data
        array = np.frombuffer(data, dtype).reshape(shape) if count else np.empty(shape, dtype)
    return array.T if draw(st.booleans()) else array


def numpy_scalars() -> st.SearchStrategy[Any]:
    return (
        arrays()
        .filter(lambda array: array.size > 0 and array.dtype.kind not in "SU")
        .map(lambda a: a.flat[0])
    )


hashable_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**60), 2**60),
    st.floats(width=64),
    text,
    st.binary(max_size=20),
    st.complex_numbers(allow_nan=False),
    st.fractions(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.dates(),
    st.times(timezones=zones),
    st.datetimes(timezones=zones),
    st.timedeltas(),
    st.sampled_from([torch.float32, torch.float8_e5m2, torch.device("cpu"), torch.device("cuda", 1)]),
    st.lists(st.text(string.ascii_letters, min_size=1), max_size=3).map(lambda parts: pathlib.Path(*parts)),
)
hashables = st.recursive(
    hashable_scalars,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
leaves = st.one_of(
    hashables,
    st.complex_numbers(),
    st.decimals(),
    tensors(),
    arrays(),
    numpy_scalars(),
    st.binary(max_size=30).map(bytearray),
    st.binary(min_size=4000, max_size=4200),
    st.sets(hashables, max_size=4),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(slice, hashables, hashables, hashables),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
)
keys = text | text.map(lambda t: f"${t}") | hashables


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(keys, inner, max_size=4)
    named = st.dictionaries(text, inner, max_size=3)
    return st.one_of(
        pairs,
        named,
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        pairs.map(collections.OrderedDict),
        pairs.map(collections.Counter),
        st.builds(collections.defaultdict, st.sampled_from([None, int, list, dict]), pairs),
        st.builds(collections.deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 5)),
        named.map(lambda attributes: _filled(argparse.Namespace(), attributes)),
        named.map(lambda attributes: _filled(SimpleNamespace(), attributes)),
    )


def _filled(namespace: Any, attributes: dict[str, Any]) -> Any:
    vars(namespace).update(attributes)
    return namespace


values = st.recursive(leaves, _containers, max_leaves=12)
COMMON = settings(
    max_examples=few(40, of=400), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@COMMON
@given(values)
def test_a_loaded_value_is_the_saved_one_and_has_its_digests(value: object) -> None:
    loaded = unpack(pack(value), where="blob")
    assert difference(loaded, value) is None
    assert difference(decode(encode(value)), value) is None
    assert leaf_digests(loaded) == leaf_digests(value)


@COMMON
@given(st.dictionaries(keys, values, max_size=5), st.randoms(use_true_random=False))
def test_digests_do_not_depend_on_key_order(value: dict[Any, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert leaf_digests(dict(items)) == leaf_digests(value)


json_trees = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "dtype", "shape", "bytes", "items", "maxlen"]), inner, max_size=3
        )
        | st.tuples(st.sampled_from([kind.tag for kind in (*KINDS, *KINDS_OF_PICKLED)]), inner).map(
            lambda pair: {pair[0]: pair[1]}
        )
    ),
    max_leaves=8,
)


@COMMON
@given(json_trees)
def test_no_tree_leads_to_anything_but_a_value_or_a_format_error(tree: Any) -> None:
    with contextlib.suppress(FormatError):
        decode(EncodedValue(tree, (torch.zeros(4, dtype=torch.uint8), torch.zeros(2, 2))), where="tree")
