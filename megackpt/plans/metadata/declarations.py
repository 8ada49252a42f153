"""What ranks declare: their chunks, and which replica each chunk is.

`mapping.describe` makes the table from the entities of one rank. `merged_declarations` has those of all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.errors import MismatchError, rank_list, truncated_list
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata.chunk_table import ArraySpec, ChunkTable, KnownArrays, Rows
from megackpt.plans.metadata.columns import Column, column


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredChunks:
    """Chunks declared by ranks.

    Attributes:
        table: the chunks.
        main: whether the row is the main replica, `[n]`.
        resizable: whether the global shape may differ from the stored one (`allow_shape_mismatch`), `[n]`.
        rank: the rank that declares the row, `[n]`.
        entity: index of the row's entity among those of the rank, `[n]`.
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
        """Encode one rank's declarations to be sent to other ranks, which know the rank of the sender."""
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
        """Decode what `rank` sent; known is as in `ChunkTable.from_columns`."""
        where = f"declarations of rank {rank}"
        table = ChunkTable.from_columns(columns, where=where, known=known)
        return cls(
            table,
            column(columns, "main", where=where, length=len(table)).astype(np.bool_),
            column(columns, "resizable", where=where, length=len(table)).astype(np.bool_),
            np.full(len(table), rank, np.int64),
            column(columns, "entity", where=where, length=len(table)),
        )


def conflict_error(versions: Mapping[str, Mapping[ArraySpec, Sequence[int]]]) -> MismatchError:
    """Return the error for keys that ranks declare differently: by key, which ranks give which spec."""
    lines = []
    for key, ranks_of_spec in sorted(versions.items()):
        by_first = sorted(ranks_of_spec.items(), key=lambda item: item[1][0])
        texts = [f"{s.dtype} {s.global_shape} on ranks {rank_list(ranks)}" for s, ranks in by_first]
        lines.append(f"{key!r}: {'; '.join(texts)}")
    return MismatchError(
        f"Ranks declare different global arrays under one key:\n{truncated_list(lines)}\n"
        f"Every rank must give the same dtype and global shape; check the sharded_state_dict() of these "
        f"keys.",
        key=min(versions),
    )
