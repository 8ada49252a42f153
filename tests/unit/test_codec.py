"""Encoding, packing and digests: what each kind looks like, what is refused, and what hostile blobs meet."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import io
import json
import math
import struct
import typing
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import safetensors.torch
import torch

from megackpt.codec import (
    Encoded,
    decode,
    dump_tree,
    encode,
    leaf_digests,
    load_tree,
    pack,
    register_codec,
    unpack,
)
from megackpt.codec.registry import REGISTRY
from megackpt.codec.tree import MAX_DEPTH
from megackpt.errors import DeclarationError, FormatError, UnserializableError
from megackpt.testing.identical import difference


class Color(enum.Enum):
    RED = "r"
    GREEN = "g"


class Mode(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    lr: float
    names: list[str]


@dataclasses.dataclass
class Derived:
    a: int
    b: int = dataclasses.field(init=False, default=0)


class Point(typing.NamedTuple):
    x: int
    y: torch.Tensor


class Opaque:
    def __init__(self, inside: object) -> None:
        self.inside = inside


class MyDict(dict[str, int]):
    pass


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts and ends with no codec registered."""
    monkeypatch.setattr(REGISTRY, "_by_class", {})
    monkeypatch.setattr(REGISTRY, "_by_name", {})


def round_trip(value: object) -> object:
    return unpack(pack(value), where="blob")


# The encoding, pinned: other readers depend on it.


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
    assert difference(decode(Encoded(load_tree(text, where="text"), ())), value) is None


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


# Exactness beyond what equality sees.


@pytest.mark.parametrize(
    "bits", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF]
)
def test_nan_payloads_survive(bits: int) -> None:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    loaded = round_trip([value, complex(value, 1.0)])
    assert difference(loaded, [value, complex(value, 1.0)]) is None


def test_huge_integers_survive_pythons_limit_on_decimal_digits() -> None:
    assert round_trip([1 << 100_000, -(1 << 100_000)]) == [1 << 100_000, -(1 << 100_000)]


@pytest.mark.parametrize(
    "dtype",
    [
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.bool,
            torch.complex64,
            torch.complex128,
        ),
        *(
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint64,
            torch.uint32,
            torch.uint16,
            torch.uint8,
        ),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # from torch 2.7 on
    ],
    ids=str,
)
def test_every_bit_of_every_dtype_survives(dtype: torch.dtype) -> None:
    octets = torch.arange(256, dtype=torch.uint8).repeat(dtype.itemsize)
    if dtype is torch.bool:
        octets %= 2
    every = octets.view(dtype)  # all NaNs among them
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
            np.datetime64("NaT"),
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


# The blob is a plain safetensors file.


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


def test_pack_refuses_a_tree_that_no_reader_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megackpt.codec.blob._MAX_HEADER_BYTES", 1000)
    with pytest.raises(
        UnserializableError, match=r"^args: all that is neither.*1,\d+ bytes.*Keep large data in"
    ):
        pack("x" * 1000, path="args")


# What is refused, with its path.


class Slot:
    """Anything: refused by default."""


def _recursive_list() -> list[object]:
    value: list[object] = [1]
    value.append({"again": value})
    return value


def _nested(levels: int, wrap: Callable[[object], object]) -> object:
    value: object = 1
    for _ in range(levels):
        value = wrap(value)
    return value


WRAPPERS: list[Callable[[object], object]] = [
    lambda v: [v],
    lambda v: (v,),
    lambda v: {"a": v},
    lambda v: {1: v},
    lambda v: collections.OrderedDict(a=v),
    lambda v: collections.defaultdict(int, {2: v}),
    lambda v: collections.deque([v]),
    lambda v: argparse.Namespace(**{"a b": v, "$": 1}),
    lambda v: frozenset([v]),
    lambda v: {(v,) if isinstance(v, int) else 0: v},
    lambda v: slice(v, None),
]

REFUSED = [
    (
        Slot(),
        r"A value of type .*test_codec\.Slot has no codec, and nothing is ever pickled.*_codec\(Slot, ",
    ),
    (
        MyDict(a=1),
        r"MyDict is a subclass of dict.*lose its class\. Save dict\(value\), or register it before",
    ),
    (Level.LOW, r"Level is an enum that is not registered.*register_codec\(Level, 'test_codec\.Level'\)"),
    (Color.RED, r"Color is an enum that is not registered"),
    (Config(0.1, []), r"Config is a dataclass that is not registered.*register_codec\(Config, '.*Config'\)"),
    (Point(1, torch.zeros(1)), r"Point is a named tuple that is not registered.*register_codec\(Point"),
    (Color, r"<enum 'Color'> is code \(a enum\.Enum\w+\), which is never saved\. Leave it out"),
    (len, r"<built-in function len> is code"),
    (object(), r"A value of type object has no codec"),
    (np.ma.array([1]), r"MaskedArray is a subclass of ndarray"),
    (np.array([(1, 2)], "i4,i4"), r"numpy array of dtype .* is not supported: structures.*Save its fields"),
    (np.array([object()]), r"numpy array of dtype object is not supported"),
    (np.void(b"ab"), r"numpy\.void has no codec"),
    (
        torch.nn.Parameter(torch.zeros(1)),
        r"Parameter is a tensor with a meaning of its own\. Save value\.detach\(\)",
    ),
    (
        torch.zeros(1, requires_grad=True),
        r"requires grad would come back without it\. Save value\.detach\(\)",
    ),
    (torch.empty(1, device="meta"), r"A meta tensor has no values\. Materialise it"),
    (torch.eye(2).to_sparse(), r"layout torch\.sparse_coo is not supported\. Save value\.to_dense\(\)"),
    (
        torch.zeros(1, dtype=torch.uint8).view(torch.bits8),
        r"Tensors of torch\.bits8 are not supported\. Save value\.view",
    ),
    (torch.zeros([1] * 65), r"A tensor of 65 dims is more than 64\. Save value\.flatten"),
    ("a\ud800", r"The str 'a\\ud800' contains a lone surrogate.*surrogateescape"),
    (
        collections.defaultdict(lambda: 1),
        r"factory <function .* cannot be saved\. Save dict\(value\), or use one of",
    ),
    (
        datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC")),
        r"\.tzinfo: A value of type zoneinfo\.ZoneInfo has no codec",
    ),
]


@pytest.mark.parametrize(
    ("value", "reason"), REFUSED, ids=lambda item: item[:25] if isinstance(item, str) else ""
)
def test_refused_values_are_named_by_path_type_and_remedy(value: object, reason: str) -> None:
    tree = {"args": argparse.Namespace(optimizer={"layers.0": [0, value]})}
    with pytest.raises(
        UnserializableError, match=r"^args\.optimizer\['layers\.0'\]\[1\].*" + reason
    ) as caught:
        encode(tree)
    assert caught.value.path is not None
    assert caught.value.path.startswith("args.optimizer['layers.0'][1]")
    with pytest.raises(UnserializableError, match=r"^\[1\]|^common"):
        pack(value, path="common")


@pytest.mark.filterwarnings("ignore:.*quantize")  # torch means to remove them
def test_a_quantized_tensor_is_refused() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnserializableError, match=r"^q: A quantized tensor.*Save value\.int_repr"):
        encode({"q": quantized})


def test_a_value_refused_at_the_top_is_named_so() -> None:
    with pytest.raises(UnserializableError, match=r"^\(top level\): A value of type object"):
        encode(object())


def test_a_value_nested_too_deeply_is_refused() -> None:
    message = r"^x\[0\].*nested more than 64 levels deep\. Save something flatter"
    with pytest.raises(UnserializableError, match=message):
        encode(_nested(MAX_DEPTH + 1, lambda v: [v]), path="x")


def test_a_value_that_contains_itself_is_refused() -> None:
    with pytest.raises(UnserializableError, match=r"^state\[1\]\.again: This list contains itself"):
        encode(_recursive_list(), path="state")


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = {"a": [torch.zeros(2)]}
    loaded = round_trip([shared, shared])
    assert difference(loaded, [shared, shared]) is None
    assert loaded[0] is not loaded[1]


def test_a_tensor_in_a_key_or_set_is_refused() -> None:
    with pytest.raises(
        UnserializableError, match=r"A key of a dict, or an element of a set, cannot hold tensors"
    ):
        encode({"s": {torch.zeros(1)}})
    with pytest.raises(UnserializableError, match=r"cannot hold tensors or arrays"):
        encode({torch.zeros(1): 1})


def test_a_closed_stream_is_refused() -> None:
    stream = io.BytesIO(b"x")
    stream.close()
    with pytest.raises(UnserializableError, match=r"^x: The io\.BytesIO is closed.*Save it before"):
        encode({"x": stream})


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_deepest_value_that_is_saved_can_be_loaded(wrap: Callable[[object], object]) -> None:
    depth = MAX_DEPTH
    while True:  # a wrapper may cost two levels
        value = _nested(depth, wrap)
        try:
            blob = pack(value)
        except UnserializableError:
            depth -= 1
        else:
            break
    assert depth >= MAX_DEPTH // 2
    assert difference(unpack(blob, where="blob"), value) is None


# User classes.


def test_a_registered_class_survives_with_what_is_inside() -> None:
    register_codec(
        Opaque, "test.Opaque", lambda value: {"inside": value.inside}, lambda saved: Opaque(saved["inside"])
    )
    loaded = round_trip([Opaque({"w": torch.ones(2), "deeper": Opaque((1, 2))})])[0]
    assert type(loaded) is Opaque
    assert loaded.inside["w"].tolist() == [1, 1]
    assert loaded.inside["deeper"].inside == (1, 2)
    assert dump_tree(encode(Opaque(1)).tree) == '{"$registered":{"name":"test.Opaque","value":{"inside":1}}}'


@pytest.mark.parametrize(
    "value",
    [Color.GREEN, Mode.READ | Mode.WRITE, Mode(0), Level.LOW, Config(0.5, ["a"]), Point(1, torch.ones(2))],
)
def test_enums_dataclasses_and_named_tuples_need_no_functions(value: object) -> None:
    register_codec(type(value), "test.Class")
    assert difference(round_trip([value]), [value]) is None


def test_registered_values_can_be_keys() -> None:
    register_codec(Color, "test.Color")
    assert round_trip({Color.RED: {Color.GREEN}}) == {Color.RED: {Color.GREEN}}


def test_a_class_and_a_name_belong_to_each_other() -> None:
    register_codec(Color, "test.Color")
    register_codec(Color, "test.Color")  # again, as when a module is reloaded
    with pytest.raises(DeclarationError, match=r"'test.Color' already belongs to .*Color.*Choose a name"):
        register_codec(Mode, "test.Color")
    with pytest.raises(
        DeclarationError, match=r"Color is already registered as 'test.Color'.*under one name"
    ):
        register_codec(Color, "test.Colour")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Opaque, "x"), r"register_codec of .*Opaque needs encode and decode.*Give both"),
        ((Derived, "x"), r"register_codec of .*Derived needs encode and decode"),
        ((Config, "x", vars), r"Config needs encode and decode"),
        ((dict, "x", dict, dict), r"dict has a codec already.*a class of your own"),
        ((list, "x", list, list), r"list has a codec already"),
        (
            (Opaque, "", vars, Opaque),
            r"Opaque got the name ''\. Give a text that will never change, such as '.*Opaque'",
        ),
        ((Opaque(1), "x", vars, Opaque), r"which is no class\. Give the class"),
    ],
)
def test_impossible_registrations_are_refused(arguments: tuple[typing.Any, ...], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        register_codec(*arguments)


def test_an_encode_function_that_raises_is_named_with_the_path() -> None:
    register_codec(Opaque, "test.Opaque", lambda value: 1 / 0, Opaque)
    with pytest.raises(
        UnserializableError, match=r"^a\.b: The encode function of codec 'test.Opaque' raised Zero.*Correct"
    ):
        encode({"a": {"b": Opaque(1)}})


def test_an_encode_function_that_returns_its_argument_does_not_hang() -> None:
    register_codec(Opaque, "test.Opaque", lambda value: value, Opaque)
    with pytest.raises(UnserializableError, match="contains itself"):
        encode(Opaque(1))


def test_a_decode_function_that_raises_is_named_with_the_path() -> None:
    register_codec(Config, "test.Config", vars, lambda saved: Config(saved["gone"], []))
    blob = pack({"a": [Config(1.0, [])]})
    with pytest.raises(
        FormatError,
        match=r"f: a\[0\]: the decode function of codec 'test.Config' raised KeyError.*both forms",
    ):
        unpack(blob, where="f")


def test_an_unknown_registered_name_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    register_codec(Color, "test.Color")
    blob = pack({"a": [Color.RED]})
    monkeypatch.setattr(REGISTRY, "_by_name", {})
    message = (
        r"^file 3: a\[0\]: saved with the codec 'test.Color', which is not registered.*Import the module"
    )
    with pytest.raises(FormatError, match=message) as caught:
        unpack(blob, where="file 3")
    assert caught.value.path == "file 3"


# Hostile trees.


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"$nonsense": 1}, r"there is no such tag; perhaps a newer"),
        ({"$tuple": [], "$set": []}, r"neither a dict nor tagged"),
        ({"$tuple": [], "a": 1}, r"neither a dict nor tagged"),
        ({"$tuple": 3}, r"a list is expected"),
        ({"$tuple": {"a": 1}}, r"a list is expected"),
        ({"$dict": [[1]]}, r"a list of 2 is expected"),
        ({"$dict": [[1, 2], [True, 3]]}, r"a key is repeated"),
        ({"$dict": [[[1], 2]]}, r"unhashable"),
        ({"$set": [1, 1.0]}, r"an element is repeated"),
        ({"$set": [{}]}, r"unhashable"),
        ({"$int": "12"}, r"hexadecimal integer"),
        ({"$int": 12}, r"a string is expected"),
        ({"$int": "0x_f"}, r"hexadecimal integer"),
        ({"$float": "1.5"}, r"'inf', '-inf' or"),
        ({"$float": "3ff0000000000000"}, r"'inf', '-inf' or"),
        ({"$complex": [1, 2]}, r"two floats"),
        ({"$bytes": "*"}, r"base64|decoded"),
        ({"$bytes": 0}, r"there is no tensor 0, only 0"),
        ({"$bytesio": {"data": "", "position": -1}}, r"negative seek"),
        ({"$tensor": 0}, r"there is no tensor 0, only 0"),
        ({"$tensor": -1}, r"there is no tensor -1"),
        ({"$tensor": True}, r"an object with the keys dtype, shape, bytes"),
        ({"$tensor": {"dtype": "object", "shape": [], "bytes": 0}}, r"no tensors of dtype 'object'"),
        ({"$ndarray": {"dtype": "|O8", "shape": [], "bytes": 0}}, r"numpy dtype '\|O8' is not one"),
        ({"$ndarray": {"dtype": "f4,f4", "shape": [], "bytes": 0}}, r"is not one that megackpt stores"),
        ({"$npscalar": {"dtype": "<f8", "hex": "00"}}, r"1 bytes for a <f8"),
        ({"$npscalar": {"dtype": "<U0", "hex": ""}}, r"has no bytes"),
        ({"$npscalar": {"dtype": "<f3", "hex": "000000"}}, r"is not one that"),
        ({"$npscalar": {"dtype": "<M8[xx]", "hex": "00" * 8}}, r"Invalid datetime unit"),
        ({"$dtype": "load"}, r"has no dtype 'load'"),
        ({"$device": "nowhere:0"}, r"device"),
        ({"$size": [1.5]}, r"an integer is expected"),
        ({"$generator": {"device": "cpu", "state": 5}}, r"cannot be decoded"),
        ({"$defaultdict": {"factory": "eval", "items": []}}, r"the factory 'eval' is none of bool"),
        ({"$defaultdict": {"factory": ["list"], "items": []}}, r"unhashable"),
        ({"$deque": {"maxlen": 1, "items": [1, 2]}}, r"2 items in a deque of at most 1"),
        ({"$deque": {"maxlen": -1, "items": []}}, r"2 items|at most -1"),
        ({"$namespace": [1]}, r"an object is expected"),
        ({"$namespace": {"$tuple": []}}, r"neither a dict nor tagged"),
        ({"$datetime": {"iso": "yesterday", "fold": 0, "tz": None}}, r"Invalid isoformat"),
        ({"$datetime": {"iso": "2024-01-01", "fold": 5, "tz": None}}, r"fold"),
        ({"$datetime": {"iso": "2024-01-01", "fold": 0, "tz": "UTC"}}, r"a timezone is expected"),
        ({"$timedelta": [10**15, 0, 0]}, r"cannot be decoded"),
        ({"$path": {"class": "Popen", "path": "ls"}}, r"class 'Popen' is none of PurePosixPath"),
        ({"$uuid": "1"}, r"badly formed"),
        ({"$fraction": [1, 0]}, r"Fraction\(1, 0\)"),
        ({"$fraction": [1.5, 2]}, r"an integer is expected"),
        ({"$decimal": "one"}, r"cannot be decoded"),
        ({"$range": [0, 1, 0]}, r"must not be zero"),
        ({"$slice": []}, r"a list of 3 is expected"),
        ({"$registered": "x"}, r"an object with the keys name, value"),
        ({"$registered": {"name": "os.system", "value": "true"}}, r"'os.system', which is not registered"),
        ("\ud800", r"lone surrogate"),
        ({"\ud800": 1}, r"lone surrogate"),
        ({1, 2}, r"a set is no JSON"),
    ],
    ids=lambda item: repr(item)[:40],
)
def test_a_tree_that_makes_no_sense_is_refused_at_its_place(tree: typing.Any, reason: str) -> None:
    with pytest.raises(FormatError, match=rf"^index: a\[1\].*{reason}") as caught:
        decode(Encoded({"a": [0, tree]}, ()), where="index")
    assert caught.value.path == "index"
    assert "Import the module" in str(caught.value) or "restore it, or use another" in str(caught.value)


def test_a_tensor_may_be_referred_to_once_and_must_be() -> None:
    tensors = (torch.zeros(1), torch.zeros(1))
    with pytest.raises(FormatError, match=r"f: \[1\]: .*tensor 0 is referred to twice"):
        decode(Encoded([{"$tensor": 0}, {"$tensor": 0}], tensors), where="f")
    with pytest.raises(FormatError, match=r"f: \(top level\): nothing refers to 1 of 2 tensors: \[0\]"):
        decode(Encoded([{"$tensor": 1}], tensors), where="f")


@pytest.mark.parametrize("shape", [[3], [2**62, 2**62], [-1], [1.5], "x", [0, 2**62], [1] * 65])
def test_a_raw_tensor_must_fill_its_shape(shape: typing.Any) -> None:
    for tag, dtype in (("$tensor", "complex64"), ("$ndarray", "<c8")):
        tree = {tag: {"dtype": dtype, "shape": shape, "bytes": 0}}
        with pytest.raises(FormatError, match=r"does not fit 8 bytes|is expected"):
            decode(Encoded(tree, (torch.zeros(8, dtype=torch.uint8),)), where="f")


def test_raw_bytes_must_be_bytes() -> None:
    tree = {"$tensor": {"dtype": "complex64", "shape": [1], "bytes": 0}}
    with pytest.raises(FormatError, match=r"stored as torch.float64 of 1 dims, not as uint8"):
        decode(Encoded(tree, (torch.zeros(1, dtype=torch.float64),)), where="f")


def test_an_empty_tensor_of_absurd_shape_costs_nothing() -> None:
    tree = {"$tensor": {"dtype": "complex64", "shape": [0, 2**52, 2**52], "bytes": 0}}
    assert decode(Encoded(tree, (torch.zeros(0, dtype=torch.uint8),)), where="f").numel() == 0
    assert unpack(blob_of(one(entry(0, 0, shape=[0, 2**62, 2**62]))), where="f").numel() == 0


def test_a_deep_tree_is_refused() -> None:
    with pytest.raises(FormatError, match=r"values are nested more than 64 levels deep.*restore it"):
        decode(Encoded(typing.cast(typing.Any, _nested(1000, lambda v: [v])), ()), where="f")


# Hostile text and blobs.


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", r"not valid JSON"),
        ("NaN", r"the constant NaN"),
        ("[-Infinity]", r"the constant -Infinity"),
        ("1" * 5000, r"an integer of 5000 digits"),
        ('{"a":1,"b":2,"a":3}', r"the key 'a' is repeated"),
        ("[" * 100_000, r"nested too deeply"),
        ('{"a":' * 100_000, r"nested too deeply"),
    ],
    ids=lambda text: text[:20],
)
def test_json_that_is_not_ours_is_refused(text: str, reason: str) -> None:
    with pytest.raises(FormatError, match=rf"^common\.json: .*{reason}.*restore it"):
        load_tree(text, where="common.json")


def test_a_float_too_large_for_the_type_is_refused() -> None:
    with pytest.raises(FormatError, match=r"f: .*infinite"):
        load_tree("[1e999]", where="f")


def blob_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def header_of(tree: str = "1", **tensors: object) -> dict[str, object]:
    return {"__metadata__": {"format": "megackpt.codec", "version": "1", "tree": tree}, **tensors}


def entry(start: int, end: int, *, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def one(described: object) -> dict[str, object]:
    return header_of('{"$tensor":0}', **{"0": described})


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"", r"0 bytes are too few"),
        (b"\0" * 7, r"7 bytes are too few"),
        (
            struct.pack("<Q", 2**63) + b"{}",
            r"header claims 9,223,372,036,854,775,808 bytes, but only 2 follow",
        ),
        (struct.pack("<Q", 3) + b"{}", r"header claims 3 bytes, but only 2 follow"),
        (blob_of(b"\xff"), r"header is not UTF-8"),
        (blob_of(b"[1]"), r"header is no JSON object"),
        (blob_of(b'{"a":1,"a":2}'), r"repeated"),
        (blob_of(b"[" * 50_000), r"nested too deeply"),
        (blob_of({}), r"does not say format 'megackpt.codec'"),
        (blob_of({"__metadata__": {"format": "pt"}}), r"does not say format"),
        (blob_of({"__metadata__": {"format": "megackpt.codec", "version": "1"}}), r"holds no tree"),
        (blob_of(header_of("{")), r"not valid JSON"),
        (blob_of(header_of("[" * 50_000)), r"nested too deeply"),
        (blob_of(header_of('{"$tensor":0}')), r"there is no tensor 0"),
        (blob_of(header_of(x=entry(0, 0))), r"does not describe tensor 0"),
        (blob_of(one([])), r"does not describe tensor 0"),
        (blob_of(one({"dtype": "U8", "shape": []})), r"does not describe tensor 0"),
        (blob_of(one(entry(0, 1, dtype="F7")), b"1"), r"tensor 0 has the unknown dtype 'F7'"),
        (blob_of(one(entry(0, 1, shape=[-1])), b"1"), r"tensor 0 has the shape \[-1\]"),
        (blob_of(one(entry(0, 1, shape=[1] * 65)), b"1"), r"tensor 0 has the shape"),
        (blob_of(one(entry(0, 1, shape=[2**63])), b"1"), r"tensor 0 has the shape"),
        (blob_of(one(entry(0, 1, shape=[True])), b"1"), r"tensor 0 has the shape"),
        (blob_of(one({**entry(0, 1), "data_offsets": [0]}), b"1"), r"tensor 0 has the data_offsets \[0\]"),
        (blob_of(one(entry(0, 1, shape=[2**62, 2**62])), b"1"), r"tensor 0 of .* claims bytes \[0:1\)"),
        (blob_of(one(entry(0, 2)), b"1"), r"claims bytes \[0:2\), where \[0:2\) of 1 are expected"),
        (blob_of(one(entry(1, 2)), b"12"), r"claims bytes \[1:2\)"),
        (blob_of(one(entry(0, 1)), b"12"), r"1 bytes at its end belong to no tensor"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_blob_that_makes_no_sense_is_refused(blob: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=rf"^rng/rank_3: .*{reason}.*restore it, or use another") as caught:
        unpack(blob, where="rng/rank_3")
    assert caught.value.path == "rng/rank_3"


def test_a_blob_of_a_newer_version_says_so() -> None:
    header = {"__metadata__": {"format": "megackpt.codec", "version": "2", "tree": "1"}}
    with pytest.raises(FormatError, match=r"f: written in version '2' .* reads '1'\. Use a newer megackpt"):
        unpack(blob_of(header), where="f")


def test_every_truncation_of_a_blob_is_refused() -> None:
    blob = pack({"w": torch.arange(4.0), "x": [1, (2, b"3")]})
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            unpack(blob[:length], where="f")


def test_no_damaged_byte_leads_to_anything_but_a_format_error_or_another_value() -> None:
    blob = pack(
        {"w": torch.arange(2.0), "t": (1, {2}, 3j, 1 << 60), "d": datetime(2024, 1, 1), "p": Path("a")}
    )
    for position in range(len(blob)):
        for value in (0, 0x22, 0x39, blob[position] ^ 1, 0xFF):
            damaged = blob[:position] + bytes([value]) + blob[position + 1 :]
            with contextlib.suppress(FormatError):
                unpack(damaged, where="f")


# Digests of leaves.


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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        ((1,), [1]),
        ({"a": 1}, argparse.Namespace(a=1)),
        ({"a": 1}, SimpleNamespace(a=1)),
        ([1], {0: 1}),
        ({}, []),
        ({"a": {"b": 1}}, {"a.b": 1}),
        ({1: 1}, {"1": 1}),
        (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), np.zeros(2, np.float32)),
    ],
)
def test_any_difference_of_class_or_bits_shows(first: object, second: object) -> None:
    assert leaf_digests({"x": first}) != leaf_digests({"x": second})


def test_the_digest_is_the_same_in_every_process_and_release() -> None:
    assert leaf_digests({"lr": 0.1}) == {"lr": "3fe5b2b0b3e27dcb3b0b7442d31eab99"}


def test_a_leaf_without_codec_is_named() -> None:
    with pytest.raises(UnserializableError, match=r"^c\.a\[0\]\[0\]: A value of type object"):
        leaf_digests({"a": [(object(),)]}, path="c")


def test_leaves_of_endless_values_are_refused() -> None:
    with pytest.raises(UnserializableError, match=r"nested more than 64 levels deep, or contain themselves"):
        leaf_digests(_recursive_list())
