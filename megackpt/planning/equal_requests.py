"""Requests of several ranks as one: equal ones, as data-parallel replicas have, are planned once.

Pure. Owns who asks for the same, one table of what is asked for, and giving what was planned for a group of
ranks back to each of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megackpt.geometry import Ints
from megackpt.metadata import ChunkTable, DeclaredChunks, merge_declarations
from megackpt.planning.copies import Copies


def equal_requests(requested: Sequence[DeclaredChunks]) -> list[list[int]]:
    """Return ranks by what they ask for: replicas, as those of data-parallel ranks, are planned once."""
    groups: dict[tuple[object, ...], list[int]] = {}
    digests: dict[int, bytes] = {}
    for rank, declared in enumerate(requested):
        arrays = declared.table.arrays
        if id(arrays) not in digests:  # ranks often share them
            digests[id(arrays)] = hashlib.blake2b(repr(arrays).encode()).digest()
        groups.setdefault((digests[id(arrays)], _digest_of_rows(declared)), []).append(rank)
    return list(groups.values())


def _digest_of_rows(declared: DeclaredChunks) -> bytes:
    """Return a digest of all that a plan takes from a declaration, besides its arrays."""
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
    """Give the copies of a group to each of its ranks; returns them and their ranks, by part and rank."""
    counts = np.array([len(ranks) for ranks in groups], np.int64)
    first = np.cumsum(counts) - counts
    row = np.repeat(np.arange(len(copies)), counts[group])
    ends = np.cumsum(counts[group])
    within = np.arange(len(row)) - np.repeat(ends - counts[group], counts[group])
    rank = np.array([rank for ranks in groups for rank in ranks], np.int64)[first[group[row]] + within]
    order = np.lexsort((rank, copies.stored[row]))
    return copies.take(row[order]), rank[order]


def merge_requests(requested: Sequence[DeclaredChunks], stored: ChunkTable) -> DeclaredChunks:
    """Put requests into one table; that a rank asks for another dtype or global shape was settled before."""
    specs = {spec.key: spec for spec in stored.arrays}

    def as_stored(declared: DeclaredChunks, rank: int) -> DeclaredChunks:
        arrays = tuple(specs[a.key] for a in declared.table.arrays)
        table = replace(declared.table, arrays=arrays)
        return replace(declared, table=table, rank=np.full(len(table), rank, np.int64))

    return merge_declarations([as_stored(declared, rank) for rank, declared in enumerate(requested)])
