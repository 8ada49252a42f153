"""The index of the native format: each chunk has the digests that its writer has told of."""

from __future__ import annotations

import numpy as np

from megackpt.formats.index_file import read_index
from megackpt.formats.native import names
from megackpt.formats.native.save import NativeSaveStrategy
from megackpt.metadata import DIGEST_BLOCK_BYTES, ArraySpec, ChunkTable, DeclaredChunks, pack_columns
from megackpt.planning import plan_save
from megackpt.storage import MemoryStore

ATTEMPT = "0" * 16
RANKS = 150  # more than twice as many as are put in order at once
LONG, SHORT = 70_000, 16  # elements of 8 bytes: three blocks, and one


def rows_of_ranks() -> DeclaredChunks:
    """Rank r holds the rows r, r + RANKS and r + 2 RANKS of a long array, and row r of a short one."""
    arrays = (ArraySpec("long", "float64", (3 * RANKS, LONG)), ArraySpec("short", "float64", (RANKS, SHORT)))
    rank = np.repeat(np.arange(RANKS), 4)
    entity = np.tile(np.arange(4), RANKS)
    start = np.stack([rank + np.where(entity < 3, entity, 0) * RANKS, np.zeros_like(rank)], axis=1)
    width = np.where(entity < 3, LONG, SHORT)
    shape = np.stack([np.ones_like(width), width], axis=1)
    array = (entity == 3).astype(np.int64)
    table = ChunkTable(arrays, array, start, shape, np.zeros_like(width), width, 8 * width)
    return DeclaredChunks(table, np.ones(len(rank), np.bool_), np.zeros(len(rank), np.bool_), rank, entity)


def test_digests_of_many_ranks_come_to_the_rows_they_are_of() -> None:
    plan, store, receipts = plan_save(rows_of_ranks(), ranks=RANKS), MemoryStore(), []
    expected: dict[int, list[int]] = {}
    for rank in range(RANKS):
        digests: list[int] = []
        for row in plan.rows_of(rank).tolist():
            blocks = -(-int(plan.table.nbytes[row]) // DIGEST_BLOCK_BYTES)
            expected[row] = [rank << 32 | len(digests) + block for block in range(blocks)]
            digests += expected[row]
        columns = {"data_start": np.array([4096 + rank]), "digests": np.array(digests, np.uint64)}
        receipts.append([pack_columns(columns)])
        store.write(names.data_file(ATTEMPT, rank), b"")
    message = NativeSaveStrategy().write_index(store, attempt=ATTEMPT, plan=plan, receipts=receipts)
    index = read_index(store, message)
    assert index.digests is not None
    first = index.digest_start.tolist()
    assert len(first) == len(expected) == 4 * RANKS
    for row, digests in expected.items():
        assert index.digests[first[row] : first[row] + len(digests)].tolist() == digests
        assert index.files[index.file[row]] == names.data_file(ATTEMPT, int(plan.writer[row]))
        assert index.offset_bytes[row] == 4096 + plan.writer[row] + plan.offset_bytes[row]
