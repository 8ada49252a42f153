"""An index that makes a few thousand chunks overlap in millions of places is rejected."""

from __future__ import annotations

import numpy as np
import pytest

from megackpt import FormatError
from megackpt.metadata import ArraySpec, ChunkTable, DeclaredChunks
from megackpt.planning import plan_load

SIDE = 2100


def test_two_thousand_chunks_that_overlap_in_four_million_cells_are_rejected() -> None:
    """The whole array, then squares along its diagonal: all their edges cross."""
    corner = np.arange(SIDE - 1)
    start = np.concatenate(([[0, 0]], np.stack((corner, corner), axis=1)))
    shape = np.concatenate(([[SIDE, SIDE]], np.full((SIDE - 1, 2), 2)))
    order = np.lexsort((*shape.T[::-1], *start.T[::-1]))
    start, shape = start[order], shape[order]
    numel = shape.prod(axis=1)
    spec = ArraySpec("w", "int8", (SIDE, SIDE))
    stored = ChunkTable((spec,), 0 * numel, start, shape, 0 * numel, numel, numel)
    ones = np.ones(1, np.int64)
    whole = ChunkTable(
        (spec,),
        0 * ones,
        np.zeros((1, 2), np.int64),
        np.full((1, 2), SIDE),
        0 * ones,
        SIDE**2 * ones,
        SIDE**2 * ones,
    )
    request = DeclaredChunks(whole, ones > 0, ones < 0, 0 * ones, 0 * ones)
    with pytest.raises(FormatError, match=r"'w' overlap in more than 4,194,304 places.* damaged or forged"):
        plan_load(request, stored, where="here")
