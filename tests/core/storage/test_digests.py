"""Block digests and file digests."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from megackpt.storage import BlockDigester, block_digests, digest_of

DATA = bytes(range(256)) * 5


def test_each_block_has_the_xxh3_digest_of_its_bytes() -> None:
    digests = block_digests(memoryview(DATA), 500)
    expected = [xxhash.xxh3_64_intdigest(DATA[start : start + 500]) for start in (0, 500, 1000)]
    assert digests.dtype == np.uint64
    assert digests.tolist() == expected


def test_empty_data_has_no_blocks() -> None:
    assert block_digests(memoryview(b""), 10).tolist() == []
    assert block_digests(memoryview(np.empty((0, 2), np.float32)), 10).tolist() == []


@pytest.mark.parametrize("part_bytes", [1, 7, 499, 500, 501, 1000, 1300])
def test_parts_of_any_size_give_the_same_digests(part_bytes: int) -> None:
    digester = BlockDigester(500)
    for start in range(0, len(DATA), part_bytes):
        digester.update(memoryview(DATA)[start : start + part_bytes])
        digester.result()  # asking early must not disturb
    assert digester.result().tolist() == block_digests(memoryview(DATA), 500).tolist()


def test_buffers_count_by_bytes_not_elements() -> None:
    numbers = np.frombuffer(DATA, np.float64).reshape(2, -1)
    assert block_digests(memoryview(numbers), 500).tolist() == block_digests(memoryview(DATA), 500).tolist()


def test_a_block_has_at_least_one_byte() -> None:
    with pytest.raises(ValueError, match="block_bytes is 0; a block has at least one byte"):
        BlockDigester(0)


def test_a_file_digest_is_the_canonical_xxh3_128() -> None:
    # The empty input's value is given in the xxHash test vectors.
    assert digest_of(b"") == "99aa06d3014798d86001c324468d497f"
