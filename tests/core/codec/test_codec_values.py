"""Values load exactly as they were saved, bit by bit; their encoding is pinned for other readers."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime as dt
import io
import json
import math
import pathlib
import string
import struct
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt.codec import EncodedValue, decode, dump_tree, encode, leaf_digests, load_tree, pack, unpack
from megackpt.codec.encoder import KINDS
from megackpt.codec.pickled import KINDS as KINDS_OF_PICKLED
from megackpt.errors import FormatError, UnserializableError
from megackpt.testing.identical import difference
from tests.support.codec import TORCH_DTYPES, recursive_list, round_trip
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": [None, True, 1, 1.0, "x"], "a": {}}, '{"b":[null,true,1,1.0,"x"],"a":{}}'),
        (-0.0, "-0.0"),
        (1e22, "1e+22"),
        (2**53, "9007199254740992"),
        (-(2**53) - 1, '{"$int":"-0x20000000000001"}'),
        (math.inf, '{"$float":"inf"}'),
        (-math.inf, '{"$float":"-inf"}'),
        (math.nan, '{"$float":"7ff8000000000000"}'),
        (1j, '{"$complex":[0.0,1.0]}'),
        ("é\n", '"é\\n"'),
        (b"abc", '{"$bytes":"YWJj"}'),
        (bytearray(b"abc"), '{"$bytearray":"YWJj"}'),
        (io.BytesIO(b"abc"), '{"$bytesio":{"data":"YWJj","position":0}}'),
        ((1, (2,)), '{"$tuple":[1,{"$tuple":[2]}]}'),
        ({3, 1, 2}, '{"$set":[1,2,3]}'),
        (frozenset("ba"), '{"$frozenset":["a","b"]}'),
        ({1: 2, "a": 3}, '{"$dict":[[1,2],["a",3]]}'),
        ({"$tuple": [1]}, '{"$dict":[["$tuple",[1]]]}'),
        ({"$x": 1, "y": 2}, '{"$dict":[["$x",1],["y",2]]}'),
        (collections.OrderedDict(a=1), '{"$ordereddict":[["a",1]]}'),
        (collections.Counter("aab"), '{"$counter":[["a",2],["b",1]]}'),
        (collections.defaultdict(list, a=[1]), '{"$defaultdict":{"factory":"list","items":[["a",[1]]]}}'),
        (collections.defaultdict(None), '{"$defaultdict":{"factory":null,"items":[]}}'),
        (collections.deque([1], 3), '{"$deque":{"maxlen":3,"items":[1]}}'),
        (argparse.Namespace(lr=0.1), '{"$namespace":{"lr":0.1}}'),
        (SimpleNamespace(lr=0.1), '{"$simplenamespace":{"lr":0.1}}'),
        (np.float32(1.5), '{"$npscalar":{"dtype":"<f4","hex":"0000c03f"}}'),
        (np.bool_(True), '{"$npscalar":{"dtype":"|b1","hex":"01"}}'),
        (np.str_("é"), '{"$npstr":"é"}'),
        (np.bytes_(b"abc"), '{"$npbytes":"YWJj"}'),
        (torch.bfloat16, '{"$dtype":"bfloat16"}'),
        (torch.device("cuda", 1), '{"$device":"cuda:1"}'),
        (torch.Size([2, 3]), '{"$size":[2,3]}'),
        (datetime(2024, 5, 17, 8), '{"$datetime":{"iso":"2024-05-17T08:00:00","fold":0,"tz":null}}'),
        (time(8, 30, fold=1), '{"$time":{"iso":"08:30:00","fold":1,"tz":null}}'),
        (date(2024, 5, 17), '{"$date":"2024-05-17"}'),
        (timedelta(seconds=-1), '{"$timedelta":[-1,86399,0]}'),
        (timezone(timedelta(hours=1), "X"), '{"$timezone":{"offset":[0,3600,0],"name":"X"}}'),
        (timezone.utc, '{"$timezone":{"offset":[0,0,0],"name":null}}'),
        (PurePosixPath("a/b"), '{"$path":{"class":"PurePosixPath","path":"a/b"}}'),
        (UUID(int=1), '{"$uuid":"00000000-0000-0000-0000-000000000001"}'),
        (Fraction(1, 3), '{"$fraction":[1,3]}'),
        (Decimal("1.20"), '{"$decimal":"1.20"}'),
        (range(0, 10, 2), '{"$range":[0,10,2]}'),
        (slice(None, 3), '{"$slice":[null,3,null]}'),
    ],
    ids=lambda item: item if isinstance(item, str) else type(item).__name__,
)
def test_the_encoding_of(value: object, text: str) -> None:
    encoded = encode(value)
    assert dump_tree(encoded.tree) == text
    assert encoded.tensors == ()
    assert difference(decode(EncodedValue(load_tree(text, where="text"), ())), value) is None


def test_portable_tensors_are_stored_as_they_are() -> None:
    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    encoded = encode([weight, np.array([1, 2], np.int16)])
    assert dump_tree(encoded.tree) == '[{"$tensor":0},{"$ndarray":1}]'
    assert [(t.dtype, tuple(t.shape)) for t in encoded.tensors] == [
        (torch.bfloat16, (3, 2)),
        (torch.int16, (2,)),
    ]
    assert all(t.is_contiguous() for t in encoded.tensors)


def test_other_dtypes_are_stored_as_bytes_with_their_dtype_and_shape() -> None:
    encoded = encode([torch.tensor([[1j]]), np.array(["1970-01-02"], "M8[D]"), np.array(1.0, ">f4")])
    assert dump_tree(encoded.tree) == (
        '[{"$tensor":{"dtype":"complex64","shape":[1,1],"bytes":0}},'
        '{"$ndarray":{"dtype":"<M8[D]","shape":[1],"bytes":1}},'
        '{"$ndarray":{"dtype":">f4","shape":[],"bytes":2}}]'
    )
    assert all(t.dtype is torch.uint8 for t in encoded.tensors)


def test_long_bytes_are_a_tensor_and_short_ones_text() -> None:
    encoded = encode(
        [bytes(4095), bytes(4096), bytearray(5000), io.BytesIO(bytes(5000)), np.bytes_(b"x" * 5000)]
    )
    assert [tuple(t.shape) for t in encoded.tensors] == [(4096,), (5000,), (5000,), (5000,)]
    assert difference(round_trip({bytes(5000): 1}), {bytes(5000): 1}) is None


def test_the_order_of_a_set_in_memory_does_not_show() -> None:
    names = [f"name{i}" for i in range(50)]
    assert encode(set(names)).tree == encode(set(reversed(names))).tree


def test_encoded_tensors_share_memory_with_the_value() -> None:
    weight = torch.zeros(3)
    assert encode({"w": weight}).tensors[0].data_ptr() == weight.data_ptr()


def test_a_blob_is_a_valid_safetensors_file() -> None:
    blob = pack({"w": torch.arange(3.0), "b": torch.tensor(1, dtype=torch.uint8), "e": torch.empty(0, 2)})
    tensors = safetensors.torch.load(blob)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"0": [0, 1, 2], "1": 1, "2": []}
    length = int.from_bytes(blob[:8], "little")
    assert length % 8 == 0
    metadata = json.loads(blob[8 : 8 + length])["__metadata__"]
    assert metadata == {
        "format": "megackpt.codec",
        "version": "1",
        "tree": '{"w":{"$tensor":0},"b":{"$tensor":1},"e":{"$tensor":2}}',
    }


def test_a_value_without_tensors_is_a_valid_safetensors_file() -> None:
    assert safetensors.torch.load(pack([1, 2])) == {}


def test_loaded_tensors_own_their_memory() -> None:
    blob = pack([torch.zeros(3), torch.ones(3)])
    first, second = unpack(memoryview(blob), where="blob")
    first += 5
    assert second.tolist() == [1, 1, 1]
    assert unpack(blob, where="blob")[0].tolist() == [0, 0, 0]
    assert first.untyped_storage().nbytes() == 12


def test_pack_rejects_a_tree_that_no_reader_would_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megackpt.codec.blob._MAX_HEADER_BYTES", 1000)
    message = r"^args: everything but tensors and bytes.*1,\d+ bytes.*Keep large data in"
    with pytest.raises(UnserializableError, match=message):
        pack("x" * 1000, path="args")


def test_leaves_are_named_by_their_path() -> None:
    value = {"args": argparse.Namespace(lr=0.1, betas=(1, 2)), "w": [torch.zeros(2), {"a.b": {}, 3: []}]}
    assert list(leaf_digests(value)) == ["args.lr", "args.betas", "w[0]", "w[1]['a.b']", "w[1][3]"]
    assert list(leaf_digests(5)) == ["(top level)"]
    assert list(leaf_digests([5], path="common")) == ["common[0]"]
    assert list(leaf_digests({"a": SimpleNamespace(x=1)})) == ["a.x"]


def test_key_order_does_not_matter_at_any_depth() -> None:
    first = {
        "a": 1,
        "b": ({"c": torch.zeros(1), "d": torch.ones(1)}, {1: 2, "x": {4, 5}}),
        "e": argparse.Namespace(f=1, g=2),
    }
    second = {
        "e": argparse.Namespace(g=2, f=1),
        "b": ({"d": torch.ones(1), "c": torch.zeros(1)}, {"x": {5, 4}, 1: 2}),
        "a": 1,
    }
    assert leaf_digests(first) == leaf_digests(second)


def test_the_digest_is_the_same_in_every_process_and_release() -> None:
    assert leaf_digests({"lr": 0.1}) == {"lr": "3fe5b2b0b3e27dcb3b0b7442d31eab99"}


def test_a_leaf_without_codec_is_named() -> None:
    with pytest.raises(UnserializableError, match=r"^c\.a\[0\]\[0\]: A value of type object"):
        leaf_digests({"a": [(object(),)]}, path="c")


def test_leaves_of_endless_values_raise_an_error() -> None:
    with pytest.raises(UnserializableError, match=r"nested more than 64 levels deep, or contain themselves"):
        leaf_digests(recursive_list())


OTHER_NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        (math.nan, OTHER_NAN),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ([1], (1,)),
        ([1], [1, 2]),
        ([1], {0: 1}),
        ([], {}),
        ({1: "a"}, {True: "a"}),
        ({1: 1}, {"1": 1}),
        ({"a": {"b": 1}}, {"a.b": 1}),
        ({"a": 1}, argparse.Namespace(a=1)),
        ({"a": 1}, SimpleNamespace(a=1)),
        (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
        ({1, 2}, {1, 3}),
        ({1}, {True}),
        (collections.deque([1], 2), collections.deque([1], 3)),
        (collections.defaultdict(int), collections.defaultdict(list)),
        (slice(1, 2), slice(True, 2)),
        (torch.zeros(1), torch.zeros(1, dtype=torch.float16)),
        (torch.zeros(1), torch.zeros(1, 1)),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(1), np.zeros(1, np.float32)),
        (np.zeros(1, ">f4"), np.zeros(1, "<f4")),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    ],
)
def test_a_difference_of_class_or_bits_shows_in_digests_and_is_found_at_any_depth(
    first: object, second: object
) -> None:
    assert leaf_digests({"x": first}) != leaf_digests({"x": second})
    assert difference(first, second) is not None
    assert difference([{"x": (first,)}], [{"x": (second,)}], path="v").startswith("v[0]['x'][0]")
    assert difference([{"x": (first,)}], [{"x": (first,)}]) is None


def test_the_order_of_keys_is_a_difference_that_digests_do_not_show() -> None:
    first, second = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert difference([first], [second], path="v").startswith("v[0]")
    assert leaf_digests(first) == leaf_digests(second)


def test_sets_are_compared_without_regard_to_their_order_in_memory() -> None:
    first = {frozenset({str(i), i}) for i in range(40)}
    second = {frozenset({i, str(i)}) for i in reversed(range(40))}
    assert difference(first, second) is None
