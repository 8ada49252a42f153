"""CRC-64/NVME as a linear function, compared with what the library says of all bytes at once."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from megackpt.errors import MissingExtraError
from megackpt.storage.crc64 import Crc64

pytest.importorskip("awscrt.checksums", reason="the extra digests is not installed")


def test_the_finished_value_is_that_of_the_catalogue() -> None:
    crc, data = Crc64(), b"123456789"
    value = crc.of(memoryview(data)[4:], crc.of(memoryview(data)[:4]))
    assert crc.finished(value, len(data)) == 0xAE8B14860A799888


def test_zeros_in_front_change_nothing_and_zeros_behind_are_a_shift() -> None:
    crc, data, zeros = Crc64(), b"some bytes", bytes(1000)
    value = crc.of(memoryview(data))
    assert crc.of(memoryview(zeros + data)) == value
    assert crc.of(memoryview(data + zeros)) == crc.shifted(value, 1000)
    assert crc.of(memoryview(zeros)) == 0


@pytest.mark.parametrize("nbytes", [1, 3, 8, 24, 127, 128, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_many_values_are_those_of_one_by_one(nbytes: int, count: int) -> None:
    crc = Crc64()
    data = np.random.default_rng(7).integers(0, 256, count * nbytes, dtype=np.uint8)
    parts = [memoryview(data.tobytes())[at : at + nbytes] for at in range(0, len(data), nbytes)]
    values = crc.of_each(memoryview(data.tobytes()), nbytes)
    assert values.tolist() == [crc.of(part) for part in parts]
    assert crc.shift(values, 77).tolist() == [crc.shifted(value, 77) for value in values.tolist()]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 64), (70, 3), (5, 101)])
def test_rows_fold_to_the_value_of_their_bytes(shape: tuple[int, int]) -> None:
    crc, (rows, count) = Crc64(), shape
    data = np.random.default_rng(7).integers(0, 256, (rows, count, 10), dtype=np.uint8)
    values = np.array([crc.of_each(row.tobytes(), 10) for row in data])  # type: ignore[arg-type]
    assert crc.fold(values, 10).tolist() == [crc.of(memoryview(row.tobytes())) for row in data]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    with pytest.raises(MissingExtraError, match=r"package awscrt, .* pip install 'megackpt\[digests\]'"):
        Crc64()
