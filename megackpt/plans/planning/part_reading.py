"""Reading the parts of an exchange: the rank that reads each, and which of its bytes are needed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.planning.assignment import assign_writers
from megackpt.plans.planning.copies import StridedCopy

GRAIN_BYTES = 64 * 1024
"""If a format can read any byte, shorter gaps are read together with the bytes around them."""


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Which ranks can read which stored chunks, where not every rank can read all.

    Attributes:
        of: number of the set of ranks that can read each stored chunk, `[n]`.
        first: where each set begins in ranks, `[sets + 1]`.
        ranks: the ranks, ascending in each set; no set is empty.
    """

    of: Ints
    first: Ints
    ranks: Ints


def assign_readers(
    nbytes: Ints, first: Ints, needing: Ints, chunk: Ints, *, readers: Readers | None, ranks: int
) -> Ints:
    """Choose the rank that reads each part of a chunk, keeping bytes per rank even, `[p]`.

    A rank that needs the part reads it, which spares sending it there. If none of these can, another one that
    can does.

    Args:
        nbytes: length of each part, `[p]`.
        first: where the ranks that need each part begin in needing, `[p + 1]`.
        needing: ranks, ascending for each part.
        chunk: the stored chunk of each part, `[p]`.
        readers: which ranks can read which chunks; None if all can read all.
        ranks: number of ranks.
    """
    if readers is None:
        return needing[assign_writers(nbytes, first, needing, ranks=ranks)]
    # Of the ranks that need a part, find those that can read it, by numbers that stand for (set, rank).
    set_of = readers.of[chunk]
    part = np.repeat(np.arange(len(chunk)), np.diff(first))
    sets = np.repeat(np.arange(len(readers.first) - 1), np.diff(readers.first))
    can_read = np.isin(set_of[part] * ranks + needing, sets * ranks + readers.ranks)
    # Parts without such a rank have all ranks of their set as candidates instead.
    needing_readers = np.bincount(part[can_read], minlength=len(chunk))
    far = np.flatnonzero(needing_readers == 0)
    counts = np.diff(readers.first)[set_of[far]]
    from_sets = joined_ranges(readers.first[set_of[far]], counts)
    parts = np.concatenate([part[can_read], np.repeat(far, counts)])
    candidates = np.concatenate([needing[can_read], readers.ranks[from_sets]])
    candidates = candidates[np.argsort(parts, kind="stable")]
    start = np.append(0, np.cumsum(np.bincount(parts, minlength=len(chunk))))
    return candidates[assign_writers(nbytes, start, candidates, ranks=ranks)]


def needed_ranges(
    copies: Sequence[StridedCopy], *, width: int, nbytes: int, block_bytes: int
) -> list[tuple[int, int]]:
    """Return the byte ranges of a part of a chunk that the copies need, ascending and disjoint.

    Blocks that no copy needs are left out.

    Args:
        copies: their sources count from the first element of the part.
        width: bytes per element.
        nbytes: length of the part, which begins at a multiple of block_bytes in its chunk.
        block_bytes: ranges begin and end at multiples of this, or at the end of the part.
    """
    grain = block_bytes if block_bytes > 1 else GRAIN_BYTES
    is_needed = np.zeros(-(-nbytes // grain), np.bool_)
    for copy in copies:
        _mark(is_needed, copy.source * width, copy.shape, copy.source_stride, width, grain)
    ends = np.flatnonzero(np.diff(is_needed, prepend=False, append=False))
    return [(a * grain, min(b * grain, nbytes)) for a, b in ends.reshape(-1, 2).tolist()]


def _mark(
    is_needed: npt.NDArray[np.bool_],
    start: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    width: int,
    grain: int,
) -> None:
    # Rows with gaps of whole blocks between them are marked one by one; otherwise everything up to the last
    # row.
    inner = sum((n - 1) * s for n, s in zip(shape[1:], stride[1:], strict=True)) * width + width
    if len(shape) > 1 and stride[0] * width - inner >= grain:
        for row in range(shape[0]):
            _mark(is_needed, start + row * stride[0] * width, shape[1:], stride[1:], width, grain)
        return
    length = inner + ((shape[0] - 1) * stride[0] * width if shape else 0)
    is_needed[start // grain : -(-(start + length) // grain)] = True
