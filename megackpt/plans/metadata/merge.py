"""Declarations that each rank has sent as columns: decoded, and merged row by row into one table.

A save merges packed declarations instead, equal lists of replicas once; see `declarations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megackpt.plans.geometry import Ints
from megackpt.plans.metadata.chunk_table import ArraySpec, ChunkTable, KnownArrays, widen
from megackpt.plans.metadata.columns import Column
from megackpt.plans.metadata.declarations import DeclaredChunks, conflict_error


def decode_declarations(per_rank: Sequence[Mapping[str, Column]]) -> list[DeclaredChunks]:
    """Decode what each rank sent, in the order of ranks.

    Data- and tensor-parallel peers list the same arrays. Each different list is decoded and checked once.
    """
    known: KnownArrays = {}
    return [DeclaredChunks.from_columns(c, rank=rank, known=known) for rank, c in enumerate(per_rank)]


def merge_declarations(per_rank: Sequence[DeclaredChunks]) -> DeclaredChunks:
    """Merge the declarations of all ranks into one table with one list of arrays; rows keep their order.

    Ranks have to give equal dtypes and global shapes, and nothing else. A key may be missing on some ranks,
    as with pipeline parallelism, and ranks may cut an array differently: `check_coverage` proves that the
    main replicas fit together, and other replicas are not stored.

    Raises:
        MismatchError: ranks give different dtypes or global shapes for a key. All such keys are listed, with
            ranks.
    """
    arrays, numbering = _merge_arrays(per_rank)
    dims = max((d.table.dims for d in per_rank), default=1)
    tables = [d.table for d in per_rank]
    # Translate the index into each rank's own list of arrays to the index into the merged list.
    array = [ids[t.array] for ids, t in zip(numbering, tables, strict=True)]
    table = ChunkTable(
        arrays,
        _cat(array),
        _cat_rows([widen(t.start, dims, fill=0) for t in tables], dims),
        _cat_rows([widen(t.shape, dims, fill=1) for t in tables], dims),
        _cat([t.flat_start for t in tables]),
        _cat([t.flat_stop for t in tables]),
        _cat([t.nbytes for t in tables]),
    )
    return DeclaredChunks(
        table,
        np.concatenate([np.zeros(0, np.bool_), *(d.main for d in per_rank)]),
        np.concatenate([np.zeros(0, np.bool_), *(d.resizable for d in per_rank)]),
        _cat([d.rank for d in per_rank]),
        _cat([d.entity for d in per_rank]),
    )


def _merge_arrays(per_rank: Sequence[DeclaredChunks]) -> tuple[tuple[ArraySpec, ...], list[Ints]]:
    """Return the sorted union of arrays and, for each rank, the index in it of each of its own arrays."""
    # Peers share one decoded tuple (see `decode_declarations`), so identity finds the different lists
    # quickly.
    distinct = {id(d.table.arrays): d.table.arrays for d in per_rank}
    # The first spec of a key is compared with all others; ranks are looked up only if there is a conflict.
    specs: dict[str, ArraySpec] = {}
    conflicts: set[str] = set()
    for arrays in distinct.values():
        for spec in arrays:
            first = specs.setdefault(spec.key, spec)
            if first is not spec and first != spec:
                conflicts.add(spec.key)
    if conflicts:
        raise conflict_error(_versions(conflicts, per_rank))
    # In an index, too, arrays are sorted by key.
    keys = sorted(specs)
    number = {key: i for i, key in enumerate(keys)}
    numbers = {at: np.array([number[a.key] for a in arrays], np.int64) for at, arrays in distinct.items()}
    return tuple(specs[k] for k in keys), [numbers[id(d.table.arrays)] for d in per_rank]


def _versions(keys: set[str], per_rank: Sequence[DeclaredChunks]) -> dict[str, dict[ArraySpec, list[int]]]:
    versions: dict[str, dict[ArraySpec, list[int]]] = {key: {} for key in keys}
    for rank, declared in enumerate(per_rank):
        for spec in declared.table.arrays:
            if spec.key in keys:
                versions[spec.key].setdefault(spec, []).append(rank)
    return versions


def _cat(columns: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *columns])


def _cat_rows(columns: Sequence[Ints], dims: int) -> Ints:
    return np.concatenate([np.zeros((0, dims), np.int64), *columns])
