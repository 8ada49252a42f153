"""Values load exactly as they were saved, also where `==` does not show a difference."""

from __future__ import annotations

import collections
import io
import math
import struct
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megackpt.testing.identical import difference
from tests.support.codec import TORCH_DTYPES, round_trip


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
