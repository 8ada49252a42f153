"""Equal requests, such as those of data-parallel replicas, so that they are planned only once. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.metadata import ChunkTable, DeclaredChunks
from megackpt.plans.metadata.merge import merge_declarations
from megackpt.plans.planning.copies import Copies


def equal_requests(requested: Sequence[DeclaredChunks]) -> list[list[int]]:
    """Group ranks by their requests: the ranks of a group request the same chunks of the same arrays."""
    groups: dict[tuple[object, ...], list[int]] = {}
    digests: dict[int, bytes] = {}
    for rank, declared in enumerate(requested):
        arrays = declared.table.arrays
        if id(arrays) not in digests:  # ranks with equal lists of arrays share one tuple
            digests[id(arrays)] = hashlib.blake2b(repr(arrays).encode()).digest()
        # The rank is in neither digest: two ranks that ask for the same are one group.
        groups.setdefault((digests[id(arrays)], _digest_of_rows(declared)), []).append(rank)
    return list(groups.values())


def _digest_of_rows(declared: DeclaredChunks) -> bytes:
    """Return a digest of everything that a plan uses of a request, besides its arrays."""
    table = declared.table
    digest = hashlib.blake2b()
    digest.update(repr(table.start.shape).encode())
    for column in (
        table.array,
        table.start,
        table.shape,
        table.flat_start,
        table.flat_stop,
        table.nbytes,
        declared.resizable,
        declared.entity,
    ):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


def for_each_rank(copies: Copies, group: Ints, groups: list[list[int]]) -> tuple[Copies, Ints]:
    """Repeat the copies of a group for each of its ranks; returns copies and ranks, sorted by part and rank.

    Args:
        copies: what was planned for the groups; `stored` is the part of a chunk.
        group: the group of each copy.
        groups: the ranks of each group.
    """
    counts = np.array([len(ranks) for ranks in groups], np.int64)
    first = np.cumsum(counts) - counts
    # Each copy stands once for every rank of its group: `within` counts these ranks from 0.
    row = np.repeat(np.arange(len(copies)), counts[group])
    within = joined_ranges(0, counts[group])
    rank = np.array([rank for ranks in groups for rank in ranks], np.int64)[first[group[row]] + within]
    order = np.lexsort((rank, copies.stored[row]))
    return copies.take(row[order]), rank[order]


def merge_requests(requested: Sequence[DeclaredChunks], stored: ChunkTable) -> DeclaredChunks:
    """Merge requests into one table, with the dtypes and global shapes of the stored arrays.

    Whether they may differ was decided before, by `check_dtypes_and_shapes`.
    """
    specs = {spec.key: spec for spec in stored.arrays}

    def as_stored(declared: DeclaredChunks, rank: int) -> DeclaredChunks:
        arrays = tuple(specs[a.key] for a in declared.table.arrays)
        table = replace(declared.table, arrays=arrays)
        return replace(declared, table=table, rank=np.full(len(table), rank, np.int64))

    return merge_declarations([as_stored(declared, rank) for rank, declared in enumerate(requested)])
