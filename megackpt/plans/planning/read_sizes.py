"""How many bytes copies make a rank read: whole blocks, and what lies in short gaps.

It computes the sum for many copies at once. A test compares it with `planning.plan_reads`.
"""

from __future__ import annotations

import numpy as np

from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.metadata import ChunkTable, itemsizes
from megackpt.plans.planning import Copies
from megackpt.plans.planning.copies import FAR_BYTES


def copied_nbytes(copies: Copies, table: ChunkTable) -> int:
    """Return the bytes that copies move; table has the stored chunks."""
    width = itemsizes(table.arrays)[table.array[copies.stored]]
    return int((copies.shape.prod(axis=1) * width).sum())


def read_nbytes(copies: Copies, table: ChunkTable, *, block_bytes: int) -> int:
    """Return the bytes that have to be read for copies, each block once.

    Rows of a copy that lie far apart in the chunk are read one by one, others with what lies between them;
    every read is of whole blocks, or ends with the chunk.
    """
    chunk, start, stop = _byte_ranges(copies, table)
    nbytes = table.nbytes[chunk]
    start = start // block_bytes * block_bytes
    stop = np.minimum(-(-stop // block_bytes) * block_bytes, nbytes)
    order = np.lexsort((start, chunk))
    chunk, start, stop = chunk[order], start[order], stop[order]
    # One line for all chunks, far enough apart not to touch: then a union is a running maximum.
    base = chunk * (int(table.nbytes.max(initial=0)) + 1)
    start, stop = start + base, stop + base
    reached = np.maximum.accumulate(np.concatenate([np.zeros(1, np.int64), stop]))[:-1]
    return int(np.maximum(stop - np.maximum(start, reached), 0).sum())


def read_ratio(copies: Copies, table: ChunkTable, *, block_bytes: int, kinds: Ints) -> float:
    """Return how many times the bytes that copies need have to be read for them; 1.0 without copies.

    Args:
        copies: what a load plan copies.
        table: the stored chunks.
        block_bytes: reads begin and end at multiples of this in a chunk, or at its end.
        kinds: a number of each entity, from 0 on. Entities of different kinds may need the same bytes, as a
            parameter and its master do: of each chunk, the kind that needs the most counts.
    """
    width = itemsizes(table.arrays)[table.array[copies.stored]]
    needed = np.zeros((int(kinds.max(initial=0)) + 1, len(table)), np.int64)
    np.add.at(needed, (kinds[copies.entity], copies.stored), copies.shape.prod(axis=1) * width)
    total = int(needed.max(axis=0).sum())
    return read_nbytes(copies, table, block_bytes=block_bytes) / total if total else 1.0


def _byte_ranges(copies: Copies, table: ChunkTable) -> tuple[Ints, Ints, Ints]:
    """Ranges of bytes of chunks that copies touch, without far gaps: (chunk, start, stop)."""
    width = itemsizes(table.arrays)[table.array[copies.stored]]
    chunk, first = copies.stored, copies.source_first
    shape, stride = copies.shape, copies.source_stride
    for d in range(shape.shape[1]):
        inner = ((shape[:, d + 1 :] - 1) * stride[:, d + 1 :]).sum(axis=1) + 1
        is_far = (stride[:, d] - inner) * width >= FAR_BYTES
        # A dim is taken apart only if those before it were, or are of one element.
        is_far &= (shape[:, :d] == 1).all(axis=1) & (shape[:, d] > 1) & (inner > 0)
        is_far &= (shape[:, d + 1 :] > 1).any(axis=1)
        counts = np.where(is_far, shape[:, d], 1)
        row = np.repeat(np.arange(len(chunk)), counts)
        first = first[row] + joined_ranges(0, counts) * stride[row, d]
        chunk, width, stride = chunk[row], width[row], stride[row]
        shape = shape[row].copy()
        shape[is_far[row], d] = 1
    last = first + ((shape - 1) * stride).sum(axis=1) + 1
    return chunk, first * width, last * width
