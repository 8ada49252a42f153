"""What has no codec, and what makes no sense to a reader, are errors that name path and remedy."""

from __future__ import annotations

import argparse
import collections
import functools
import io
import json
import struct
import typing
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from megackpt.codec import EncodedValue, decode, encode, load_tree, pack, unpack
from megackpt.codec.tree import MAX_DEPTH
from megackpt.errors import FormatError, UnserializableError
from megackpt.testing.identical import difference
from tests.support.codec import Config, nested, recursive_list, round_trip
from tests.support.states import freed


class MyDict(dict[str, int]):
    pass


class Slot:
    """Anything: rejected by default."""


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


REJECTED = [
    (
        Slot(),
        r"A value of type .*test_codec_errors\.Slot has no codec, "
        r"and nothing is ever pickled.*_codec\(Slot, ",
    ),
    (
        MyDict(a=1),
        r"MyDict is a subclass of dict.*lose its class if saved as that\. Save dict\(value\), or register it",
    ),
    (Config(0.1, []), r"Config is a dataclass that .*run its __init__.*register_codec\(Config, '.*Config'\)"),
    (len, r"<built-in function len> is code .* Leave it out and .* loading, or save its name, 'len'\.$"),
    (lambda: 1, r"<lambda> .* is code \(a function\).* create it again after loading\.$"),
    (functools.partial(max, 1), r"code \(a functools\.partial\).* or register it .*codec\(partial, '"),
    (type(None), r"NoneType'> is a class that no load can find by its name, builtins\.NoneType\. Define it"),
    (type("Local", (), {}), r"Local'> is a class that .* or save a name for it, such as 'Local'"),
    (object(), r"A value of type object has no codec"),
    (np.ma.array([1]), r"MaskedArray is a subclass of ndarray"),
    (np.array([(1, 2)], "i4,i4"), r"numpy array of dtype .* is not supported: structures.*Save its fields"),
    (np.array([object()]), r"numpy array of dtype object is not supported"),
    (np.void(b"ab"), r"numpy\.void has no codec"),
    (torch.nn.Parameter(torch.zeros(1)), r"Parameter is not a plain tensor\. Save value\.detach\(\)"),
    (torch.zeros(1, requires_grad=True), r"requires grad would load without it\. Save value\.detach\(\)"),
    (torch.empty(1, device="meta"), r"A meta tensor has no values\. Materialise it"),
    (torch.eye(2).to_sparse(), r"layout torch\.sparse_coo is not supported\. Save value\.to_dense\(\)"),
    (
        torch.zeros(1, dtype=torch.uint8).view(torch.bits8),
        r"Tensors of torch\.bits8 are not supported\. Save value\.view",
    ),
    (freed(torch.ones(2)), r"A tensor without memory has no values\. Save it while its memory is there"),
    (freed(torch.ones(4), nbytes=12), r"A tensor without memory"),
    (torch._to_functional_tensor(torch.ones(2)), r"A tensor without memory"),
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
    ("value", "reason"), REJECTED, ids=lambda item: item[:25] if isinstance(item, str) else ""
)
def test_rejected_values_are_named_by_path_type_and_remedy(value: object, reason: str) -> None:
    tree = {"args": argparse.Namespace(optimizer={"layers.0": [0, value]})}
    message = r"^args\.optimizer\['layers\.0'\]\[1\].*" + reason
    with pytest.raises(UnserializableError, match=message) as caught:
        encode(tree)
    assert caught.value.path is not None
    assert caught.value.path.startswith("args.optimizer['layers.0'][1]")
    with pytest.raises(UnserializableError, match=r"^\[1\]|^common"):
        pack(value, path="common")


@pytest.mark.filterwarnings("ignore:.*quantize")  # torch means to remove them
def test_a_quantized_tensor_is_rejected() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnserializableError, match=r"^q: A quantized tensor.*Save value\.int_repr"):
        encode({"q": quantized})


def closed_stream() -> io.BytesIO:
    stream = io.BytesIO(b"x")
    stream.close()
    return stream


WHOLE = [
    (object(), "", r"^\(top level\): A value of type object"),
    (
        nested(MAX_DEPTH + 1, lambda v: [v]),
        "x",
        r"^x\[0\].*nested more than 64 levels deep\. Save something flatter",
    ),
    (recursive_list(), "state", r"^state\[1\]\.again: This list contains itself"),
    ({"s": {torch.zeros(1)}}, "", r"A key of a dict, or an element of a set, cannot contain tensors"),
    ({torch.zeros(1): 1}, "", r"cannot contain tensors or arrays"),
    ({"x": closed_stream()}, "", r"^x: The io\.BytesIO is closed.*Save it before"),
]


@pytest.mark.parametrize(
    ("value", "path", "message"), WHOLE, ids=["top", "deep", "cycle", "set", "key", "closed"]
)
def test_a_value_that_cannot_be_saved_where_it_stands_is_rejected(
    value: object, path: str, message: str
) -> None:
    with pytest.raises(UnserializableError, match=message):
        encode(value, path=path)


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = {"a": [torch.zeros(2)]}
    loaded = round_trip([shared, shared])
    assert difference(loaded, [shared, shared]) is None
    assert loaded[0] is not loaded[1]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_deepest_value_that_is_saved_can_be_loaded(wrap: Callable[[object], object]) -> None:
    depth = MAX_DEPTH
    while True:  # a wrapper may cost two levels
        value = nested(depth, wrap)
        try:
            blob = pack(value)
        except UnserializableError:
            depth -= 1
        else:
            break
    assert depth >= MAX_DEPTH // 2
    assert difference(unpack(blob, where="blob"), value) is None


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
        ({"$defaultdict": {"factory": "eval", "items": []}}, r"the factory 'eval' is not one of bool"),
        ({"$defaultdict": {"factory": ["list"], "items": []}}, r"unhashable"),
        ({"$deque": {"maxlen": 1, "items": [1, 2]}}, r"2 items in a deque of at most 1"),
        ({"$deque": {"maxlen": -1, "items": []}}, r"2 items|at most -1"),
        ({"$namespace": [1]}, r"an object is expected"),
        ({"$namespace": {"$tuple": []}}, r"neither a dict nor tagged"),
        ({"$datetime": {"iso": "yesterday", "fold": 0, "tz": None}}, r"Invalid isoformat"),
        ({"$datetime": {"iso": "2024-01-01", "fold": 5, "tz": None}}, r"fold"),
        ({"$datetime": {"iso": "2024-01-01", "fold": 0, "tz": "UTC"}}, r"a timezone is expected"),
        ({"$timedelta": [10**15, 0, 0]}, r"cannot be decoded"),
        ({"$path": {"class": "Popen", "path": "ls"}}, r"class 'Popen' is not one of PurePosixPath"),
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
        ({1, 2}, r"a set is not JSON"),
    ],
    ids=lambda item: repr(item)[:40],
)
def test_a_tree_that_makes_no_sense_is_rejected_with_its_path(tree: typing.Any, reason: str) -> None:
    with pytest.raises(FormatError, match=rf"^index: a\[1\].*{reason}") as caught:
        decode(EncodedValue({"a": [0, tree]}, ()), where="index")
    assert caught.value.path == "index"
    assert "Import the module" in str(caught.value) or "restore it, or use another" in str(caught.value)


def test_a_tensor_may_be_referred_to_once_and_must_be() -> None:
    tensors = (torch.zeros(1), torch.zeros(1))
    with pytest.raises(FormatError, match=r"f: \[1\]: .*tensor 0 is referred to twice"):
        decode(EncodedValue([{"$tensor": 0}, {"$tensor": 0}], tensors), where="f")
    with pytest.raises(FormatError, match=r"f: \(top level\): nothing refers to 1 of 2 tensors: \[0\]"):
        decode(EncodedValue([{"$tensor": 1}], tensors), where="f")


@pytest.mark.parametrize("shape", [[3], [2**62, 2**62], [-1], [1.5], "x", [0, 2**62], [1] * 65])
def test_a_raw_tensor_must_fill_its_shape(shape: typing.Any) -> None:
    for tag, dtype in (("$tensor", "complex64"), ("$ndarray", "<c8")):
        tree = {tag: {"dtype": dtype, "shape": shape, "bytes": 0}}
        with pytest.raises(FormatError, match=r"does not fit 8 bytes|is expected"):
            decode(EncodedValue(tree, (torch.zeros(8, dtype=torch.uint8),)), where="f")


def test_raw_bytes_must_be_bytes() -> None:
    tree = {"$tensor": {"dtype": "complex64", "shape": [1], "bytes": 0}}
    with pytest.raises(FormatError, match=r"stored as torch.float64 of 1 dims, not as uint8"):
        decode(EncodedValue(tree, (torch.zeros(1, dtype=torch.float64),)), where="f")


def test_an_empty_tensor_of_absurd_shape_costs_nothing() -> None:
    tree = {"$tensor": {"dtype": "complex64", "shape": [0, 2**52, 2**52], "bytes": 0}}
    assert decode(EncodedValue(tree, (torch.zeros(0, dtype=torch.uint8),)), where="f").numel() == 0
    assert unpack(blob_of(described_as(entry(0, 0, shape=[0, 2**62, 2**62]))), where="f").numel() == 0


def test_a_deep_tree_is_rejected() -> None:
    with pytest.raises(FormatError, match=r"values are nested more than 64 levels deep.*restore it"):
        decode(EncodedValue(typing.cast(typing.Any, nested(1000, lambda v: [v])), ()), where="f")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", r"not valid JSON"),
        ("NaN", r"the constant NaN"),
        ("[-Infinity]", r"the constant -Infinity"),
        ("[1e999]", r"infinite"),
        ("1" * 5000, r"an integer of 5000 digits"),
        ('{"a":1,"b":2,"a":3}', r"the key 'a' is repeated"),
        ("[" * 100_000, r"nested too deeply"),
        ('{"a":' * 100_000, r"nested too deeply"),
    ],
    ids=lambda text: text[:20],
)
def test_json_that_is_not_ours_is_rejected(text: str, reason: str) -> None:
    with pytest.raises(FormatError, match=rf"^common\.json: .*{reason}.*restore it"):
        load_tree(text, where="common.json")


def blob_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def header_of(tree: str = "1", **tensors: object) -> dict[str, object]:
    return {"__metadata__": {"format": "megackpt.codec", "version": "1", "tree": tree}, **tensors}


def entry(start: int, end: int, *, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def described_as(described: object) -> dict[str, object]:
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
        (blob_of(b"[1]"), r"header is not a JSON object"),
        (blob_of(b'{"a":1,"a":2}'), r"repeated"),
        (blob_of(b"[" * 50_000), r"nested too deeply"),
        (blob_of({}), r"does not say format 'megackpt.codec'"),
        (blob_of({"__metadata__": {"format": "pt"}}), r"does not say format"),
        (blob_of({"__metadata__": {"format": "megackpt.codec", "version": "1"}}), r"has no tree"),
        (blob_of(header_of("{")), r"not valid JSON"),
        (blob_of(header_of("[" * 50_000)), r"nested too deeply"),
        (blob_of(header_of('{"$tensor":0}')), r"there is no tensor 0"),
        (blob_of(header_of(x=entry(0, 0))), r"does not describe tensor 0"),
        (blob_of(described_as([])), r"does not describe tensor 0"),
        (blob_of(described_as({"dtype": "U8", "shape": []})), r"does not describe tensor 0"),
        (blob_of(described_as(entry(0, 1, dtype="F7")), b"1"), r"tensor 0 has the unknown dtype 'F7'"),
        (blob_of(described_as(entry(0, 1, shape=[-1])), b"1"), r"tensor 0 has the shape \[-1\]"),
        (blob_of(described_as(entry(0, 1, shape=[1] * 65)), b"1"), r"tensor 0 has the shape"),
        (blob_of(described_as(entry(0, 1, shape=[2**63])), b"1"), r"tensor 0 has the shape"),
        (blob_of(described_as(entry(0, 1, shape=[True])), b"1"), r"tensor 0 has the shape"),
        (
            blob_of(described_as({**entry(0, 1), "data_offsets": [0]}), b"1"),
            r"tensor 0 has the data_offsets \[0\]",
        ),
        (
            blob_of(described_as(entry(0, 1, shape=[2**62, 2**62])), b"1"),
            r"tensor 0 of .* claims bytes \[0:1\)",
        ),
        (blob_of(described_as(entry(0, 2)), b"1"), r"claims bytes \[0:2\), but \[0:2\) of 1 are expected"),
        (blob_of(described_as(entry(1, 2)), b"12"), r"claims bytes \[1:2\)"),
        (blob_of(described_as(entry(0, 1)), b"12"), r"1 bytes at its end belong to no tensor"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_blob_that_makes_no_sense_is_rejected(blob: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=rf"^rng/rank_3: .*{reason}.*restore it, or use another") as caught:
        unpack(blob, where="rng/rank_3")
    assert caught.value.path == "rng/rank_3"


def test_a_blob_of_a_newer_version_is_an_error() -> None:
    header = {"__metadata__": {"format": "megackpt.codec", "version": "2", "tree": "1"}}
    with pytest.raises(FormatError, match=r"f: written in version '2' .* reads '1'\. Use a newer megackpt"):
        unpack(blob_of(header), where="f")


def test_every_truncation_of_a_blob_is_rejected() -> None:
    blob = pack({"w": torch.arange(4.0), "x": [1, (2, b"3")]})
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            unpack(blob[:length], where="f")


def test_a_damaged_byte_is_a_format_error_or_another_value_that_can_be_saved() -> None:
    value = {"w": torch.arange(2.0), "t": (1, {2}, 3j, 1 << 60), "d": datetime(2024, 1, 1), "p": Path("a")}
    blob = pack(value)
    outcomes: Counter[str] = Counter()
    for position in range(len(blob)):
        for byte in {0, 0x22, 0x39, blob[position] ^ 1, 0xFF} - {blob[position]}:
            damaged = blob[:position] + bytes([byte]) + blob[position + 1 :]
            try:
                other = unpack(damaged, where="f")
            except FormatError as error:
                outcomes[f"error in {error.path}"] += 1
                continue
            # Only values of classes with a codec come out of a blob, so what came out goes back in.
            assert difference(unpack(pack(other), where="f"), other) is None
            outcomes["same value" if difference(other, value) is None else "other value"] += 1
    # A byte of a tensor has no checksum here; almost every byte of the header matters.
    assert outcomes["error in f"] > 2 * len(blob)
    assert outcomes["other value"] >= 4 * 8  # four other bytes for each of the 8 of the tensor
