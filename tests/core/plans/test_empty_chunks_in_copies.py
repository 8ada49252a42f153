"""Empty chunks of a checkpoint are not written once more: a copy has files and rows for elements only."""

from __future__ import annotations

import numpy as np

from megackpt.metadata import ArraySpec, ChunkTable
from megackpt.planning.copy_plan import plan_copy


def test_a_chunk_without_elements_is_not_copied() -> None:
    extent = np.array([0, 3, 5])
    start = np.array([0, 0, 3])
    stored = ChunkTable(
        (ArraySpec("w", "int8", (8,)),),
        np.zeros(3, np.int64),
        start[:, None],
        extent[:, None],
        np.zeros(3, np.int64),
        extent,
        extent,
    )
    plan = plan_copy(stored, np.arange(3), ranks=2).plan
    assert plan.table.start[:, 0].tolist() == [0, 3]
    assert plan.table.shape[:, 0].tolist() == [3, 5]
