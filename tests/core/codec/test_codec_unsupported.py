"""Values without a codec are errors that name their path, their type and a remedy."""

from __future__ import annotations

import argparse
import collections
import io
from collections.abc import Callable
from datetime import datetime
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from megackpt.codec import encode, pack, unpack
from megackpt.codec.tree import MAX_DEPTH
from megackpt.errors import UnserializableError
from megackpt.testing.identical import difference
from tests.support.codec import Color, Config, nested, recursive_list, round_trip


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
        r"A value of type .*test_codec_unsupported\.Slot has no codec, "
        r"and nothing is ever pickled.*_codec\(Slot, ",
    ),
    (
        MyDict(a=1),
        r"MyDict is a subclass of dict.*lose its class if saved as that\. Save dict\(value\), or register it",
    ),
    (
        Config(0.1, []),
        r"Config is a dataclass that .*run its __init__.*register_codec\(Config, '.*Config'\)",
    ),
    (Color, r"<enum 'Color'> is code \(a enum\.Enum\w+\), which is never saved\. Leave it out"),
    (len, r"<built-in function len> is code"),
    (object(), r"A value of type object has no codec"),
    (np.ma.array([1]), r"MaskedArray is a subclass of ndarray"),
    (np.array([(1, 2)], "i4,i4"), r"numpy array of dtype .* is not supported: structures.*Save its fields"),
    (np.array([object()]), r"numpy array of dtype object is not supported"),
    (np.void(b"ab"), r"numpy\.void has no codec"),
    (
        torch.nn.Parameter(torch.zeros(1)),
        r"Parameter is not a plain tensor\. Save value\.detach\(\)",
    ),
    (
        torch.zeros(1, requires_grad=True),
        r"requires grad would load without it\. Save value\.detach\(\)",
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
    ("value", "reason"), REJECTED, ids=lambda item: item[:25] if isinstance(item, str) else ""
)
def test_rejected_values_are_named_by_path_type_and_remedy(value: object, reason: str) -> None:
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
def test_a_quantized_tensor_is_rejected() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnserializableError, match=r"^q: A quantized tensor.*Save value\.int_repr"):
        encode({"q": quantized})


def test_a_value_rejected_at_the_top_is_named_so() -> None:
    with pytest.raises(UnserializableError, match=r"^\(top level\): A value of type object"):
        encode(object())


def test_a_value_nested_too_deeply_is_rejected() -> None:
    message = r"^x\[0\].*nested more than 64 levels deep\. Save something flatter"
    with pytest.raises(UnserializableError, match=message):
        encode(nested(MAX_DEPTH + 1, lambda v: [v]), path="x")


def test_a_value_that_contains_itself_is_rejected() -> None:
    with pytest.raises(UnserializableError, match=r"^state\[1\]\.again: This list contains itself"):
        encode(recursive_list(), path="state")


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = {"a": [torch.zeros(2)]}
    loaded = round_trip([shared, shared])
    assert difference(loaded, [shared, shared]) is None
    assert loaded[0] is not loaded[1]


def test_a_tensor_in_a_key_or_set_is_rejected() -> None:
    with pytest.raises(
        UnserializableError, match=r"A key of a dict, or an element of a set, cannot contain tensors"
    ):
        encode({"s": {torch.zeros(1)}})
    with pytest.raises(UnserializableError, match=r"cannot contain tensors or arrays"):
        encode({torch.zeros(1): 1})


def test_a_closed_stream_is_rejected() -> None:
    stream = io.BytesIO(b"x")
    stream.close()
    with pytest.raises(UnserializableError, match=r"^x: The io\.BytesIO is closed.*Save it before"):
        encode({"x": stream})


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
