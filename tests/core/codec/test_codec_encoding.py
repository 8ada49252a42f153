"""The encoding, pinned as other readers depend on it; digests of leaves; the comparison of the tests."""

from __future__ import annotations

import argparse
import collections
import io
import json
import math
import struct
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from types import SimpleNamespace
from uuid import UUID

import numpy as np
import pytest
import safetensors.torch
import torch

from megackpt.codec import EncodedValue, decode, dump_tree, encode, leaf_digests, load_tree, pack, unpack
from megackpt.errors import UnserializableError
from megackpt.testing.identical import difference
from tests.support.codec import recursive_list, round_trip


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
    with pytest.raises(
        UnserializableError, match=r"^args: everything but tensors and bytes.*1,\d+ bytes.*Keep large data in"
    ):
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
        (math.nan, OTHER_NAN),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ([1], (1,)),
        ([1], [1, 2]),
        ({1: "a"}, {True: "a"}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2}, {1, 3}),
        ({1}, {True}),
        (collections.deque([1], 2), collections.deque([1], 3)),
        (collections.defaultdict(int), collections.defaultdict(list)),
        (slice(1, 2), slice(True, 2)),
        (torch.zeros(1), torch.zeros(1, dtype=torch.float16)),
        (torch.zeros(1), torch.zeros(1, 1)),
        (torch.zeros(1), -torch.zeros(1)),
        (np.zeros(1, ">f4"), np.zeros(1, "<f4")),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    ],
)
def test_a_difference_of_class_or_bits_is_found_at_any_depth(first: object, second: object) -> None:
    assert difference(first, second) is not None
    assert difference([{"x": (first,)}], [{"x": (second,)}], path="v").startswith("v[0]['x'][0]")
    assert difference([{"x": (first,)}], [{"x": (first,)}]) is None


def test_sets_are_compared_without_regard_to_their_order_in_memory() -> None:
    first = {frozenset({str(i), i}) for i in range(40)}
    second = {frozenset({i, str(i)}) for i in reversed(range(40))}
    assert difference(first, second) is None
