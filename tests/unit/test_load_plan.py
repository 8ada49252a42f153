"""A load plan finds the chunks of a request, and of no other array."""

from __future__ import annotations

import numpy as np

from megackpt.metadata import ArraySpec, ChunkTable, DeclaredChunks
from megackpt.planning import plan_load


def test_arrays_that_are_together_longer_than_64_bits_are_told_apart() -> None:
    length, arrays = 2**59, 40
    specs = tuple(ArraySpec(f"k{i:02d}", "int8", (length,)) for i in range(arrays))
    array = np.repeat(np.arange(arrays), 2)
    start = np.tile([0, length // 2], arrays)[:, None]
    half = np.full(2 * arrays, length // 2)
    stored = ChunkTable(specs, array, start, half[:, None], 0 * half, half, half)
    wanted = ChunkTable(
        specs[1::2],
        np.arange(arrays // 2),
        np.full((arrays // 2, 1), length // 2 + 5),
        np.full((arrays // 2, 1), 7),
        np.zeros(arrays // 2, np.int64),
        np.full(arrays // 2, 7),
        np.full(arrays // 2, 7),
    )
    no = np.zeros(arrays // 2, np.bool_)
    slots = np.arange(arrays // 2)
    copies = plan_load(DeclaredChunks(wanted, ~no, no, 0 * slots, slots), stored, where="here")
    assert copies.stored.tolist() == [4 * i + 3 for i in range(arrays // 2)]
    assert copies.source_first.tolist() == [5] * (arrays // 2)
