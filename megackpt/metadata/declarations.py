"""What ranks declare: their chunks, and which copy each is.

Owns the table that is exchanged before planning. Making it from entities is `mapping.describe`'s work;
merging those of all ranks is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.errors import MismatchError, rank_list, truncated_list
from megackpt.geometry import Ints
from megackpt.metadata.chunk_table import ArraySpec, ChunkTable, KnownArrays, Rows, widen
from megackpt.metadata.columns import Column, column


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredChunks:
    """Chunks held by ranks.

    Attributes:
        table: the chunks.
        main: whether the row is the main replica, `[n]`.
        resizable: whether the global shape may differ from the stored one (`allow_shape_mismatch`), `[n]`.
        rank: who holds the row, `[n]`.
        entity: position in that rank's own list of entities, `[n]`.
    """

    table: ChunkTable
    main: npt.NDArray[np.bool_]
    resizable: npt.NDArray[np.bool_]
    rank: Ints
    entity: Ints

    def __len__(self) -> int:
        return len(self.table)

    def take(self, rows: Rows) -> DeclaredChunks:
        """Return the chosen rows."""
        return DeclaredChunks(
            self.table.take(rows), self.main[rows], self.resizable[rows], self.rank[rows], self.entity[rows]
        )

    def to_columns(self) -> dict[str, Column]:
        """Encode one rank's declarations for the exchange; the rank is known from who sent them."""
        return {
            **self.table.to_columns(),
            "main": self.main,
            "resizable": self.resizable,
            "entity": self.entity,
        }

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Column], *, rank: int, known: KnownArrays | None = None
    ) -> DeclaredChunks:
        """Decode what `rank` sent; for known see `ChunkTable.from_columns`."""
        where = f"declarations of rank {rank}"
        table = ChunkTable.from_columns(columns, where=where, known=known)
        return cls(
            table,
            column(columns, "main", where=where, length=len(table)).astype(np.bool_),
            column(columns, "resizable", where=where, length=len(table)).astype(np.bool_),
            np.full(len(table), rank, np.int64),
            column(columns, "entity", where=where, length=len(table)),
        )


def decode_declarations(per_rank: Sequence[Mapping[str, Column]]) -> list[DeclaredChunks]:
    """Decode what each rank sent, in the order of ranks.

    Data- and tensor-parallel peers list the same arrays; each such list is decoded, checked and kept once.
    """
    known: KnownArrays = {}
    return [DeclaredChunks.from_columns(c, rank=rank, known=known) for rank, c in enumerate(per_rank)]


def merge_declarations(per_rank: Sequence[DeclaredChunks]) -> DeclaredChunks:
    """Put the declarations of all ranks into one table with one list of arrays; rows stay in their order.

    dtype and global shape are all that ranks have to agree on. A key may be missing on some ranks (that is
    pipeline parallelism), and ranks may cut an array differently: where main replicas are concerned, coverage
    proves what matters of that, and other replicas are not stored.

    Raises:
        MismatchError: ranks give different dtypes or global shapes for a key; all such keys are listed,
            with ranks.
    """
    arrays, numbering = _merge_arrays(per_rank)
    dims = max((d.table.dims for d in per_rank), default=1)
    tables = [d.table for d in per_rank]
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
    """Return the sorted union of arrays and, for each rank, the number there of each of its own."""
    distinct = {id(d.table.arrays): d.table.arrays for d in per_rank}  # peers share the list they decoded
    specs: dict[str, ArraySpec] = {}
    conflicts: set[str] = set()
    for arrays in distinct.values():
        for spec in arrays:
            first = specs.setdefault(spec.key, spec)
            if first is not spec and first != spec:
                conflicts.add(spec.key)
    if conflicts:
        raise conflict_error(_versions(conflicts, per_rank))
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


def conflict_error(versions: Mapping[str, Mapping[ArraySpec, Sequence[int]]]) -> MismatchError:
    """Return the error for keys that ranks declare differently: by key, which ranks say what."""
    lines = []
    for key, said in sorted(versions.items()):
        by_first = sorted(said.items(), key=lambda item: item[1][0])
        texts = [f"{s.dtype} {s.global_shape} on ranks {rank_list(ranks)}" for s, ranks in by_first]
        lines.append(f"{key!r}: {'; '.join(texts)}")
    return MismatchError(
        f"Ranks declare different global arrays under one key:\n{truncated_list(lines)}\n"
        f"Every rank must give the same dtype and global shape; check the sharded_state_dict() of these "
        f"keys.",
        key=min(versions),
    )


def _cat(columns: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *columns])


def _cat_rows(columns: Sequence[Ints], dims: int) -> Ints:
    return np.concatenate([np.zeros((0, dims), np.int64), *columns])
