"""What compressed bytes expand to, known before they are expanded: never less than they really do."""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from megackpt.formats.zarr import expansion_limits

numcodecs = pytest.importorskip("numcodecs")

PART = expansion_limits._PART_BYTES
NOISE = np.random.default_rng(0).integers(0, 256, PART + 7, np.uint8).tobytes()
DATA = {
    "nothing": b"",
    "a byte": b"x",
    "zeros": bytes(3 * PART + 5),
    "noise": NOISE,
    "both": NOISE + bytes(PART),
}

# Compressor of zarr, how its bytes are made, and whether the size is known exactly.
COMPRESSORS: dict[str, tuple[str, Callable[[bytes], bytes], bool]] = {
    "gzip": ("gzip", gzip.compress, True),
    "zlib": ("zlib", zlib.compress, True),
    "bz2": ("bz2", bz2.compress, True),
    "two files of gzip": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]), True),
    "two files of bz2": ("bz2", lambda data: bz2.compress(data[:9]) + bz2.compress(data[9:]), True),
    "zstd": ("zstd", lambda data: bytes(numcodecs.Zstd(3).encode(data)), False),
    "two frames of zstd": (
        "zstd",
        lambda data: bytes(numcodecs.Zstd().encode(data[:9])) + bytes(numcodecs.Zstd().encode(data[9:])),
        False,
    ),
    "zstd with a checksum": ("zstd", lambda data: bytes(numcodecs.Zstd(checksum=True).encode(data)), False),
}


def sizes(compressor: str, compressed: bytes) -> list[int]:
    return list(expansion_limits._EXPANDED_SIZES[compressor](compressed))


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_size_is_known_before_all_is_expanded(name: str, data: bytes) -> None:
    compressor, compress, is_exact = COMPRESSORS[name]
    totals = sizes(compressor, compress(data))
    assert totals == sorted(totals)
    total = totals[-1] if totals else 0
    assert total >= len(data)
    if is_exact:
        assert total == len(data)
        assert all(later - earlier <= PART for earlier, later in zip([0, *totals], totals, strict=False))
    else:  # a block of zstd is at most 128 KiB
        assert total <= len(data) + 2 * 2**17


@pytest.mark.parametrize("compressor", ["gzip", "zlib", "bz2", "zstd"])
def test_bytes_that_are_cut_or_malformed_have_no_more_than_what_can_be_expanded(compressor: str) -> None:
    compressed = COMPRESSORS[compressor][1](DATA["both"])
    for length in (0, 1, 5, len(compressed) // 2, len(compressed) - 1):
        assert (sizes(compressor, compressed[:length]) or [0])[-1] <= len(DATA["both"]) + 2 * 2**17
    assert sizes(compressor, b"no such format at all") == []
    assert sizes(compressor, compressed + b"?")[-1] >= len(DATA["both"])
