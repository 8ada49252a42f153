"""For any value that has a codec: unpack(pack(x)) is x, class by class and bit by bit."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime as dt
import pathlib
import string
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt.codec import EncodedValue, decode, encode, leaf_digests, pack, unpack
from megackpt.codec.encoder import KINDS
from megackpt.codec.pickled import KINDS as KINDS_OF_PICKLED
from megackpt.errors import FormatError
from megackpt.testing.identical import difference
from tests.support.codec import TORCH_DTYPES

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
COMMON = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@COMMON
@given(values)
def test_unpacking_a_packed_value_gives_that_value(value: object) -> None:
    assert difference(unpack(pack(value), where="blob"), value) is None


@COMMON
@given(values)
def test_decoding_an_encoded_value_gives_that_value(value: object) -> None:
    assert difference(decode(encode(value)), value) is None


@COMMON
@given(values)
def test_a_loaded_value_has_the_digests_of_the_saved_one(value: object) -> None:
    assert leaf_digests(unpack(pack(value), where="blob")) == leaf_digests(value)


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
