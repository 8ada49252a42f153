"""What ranks declare: their chunks, and which replica each chunk is.

`entities.describe` makes the table from the entities of one rank. `MergedDeclarations` has those of all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError, MismatchError, rank_list, truncated_list
from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.metadata.chunk_table import (
    ArraySpec,
    ChunkTable,
    DecodedArrays,
    KnownArrays,
    Rows,
    itemsizes,
)
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


# What all ranks declare, as the rank that plans a save receives it: equal lists of rows only once.
#
# Each rank packs its rows into two byte strings, so that rank 0 can merge those of many thousand ranks with a
# few array operations. The rows of main replicas differ between ranks. The other rows are equal on
# data-parallel ranks, and only one rank of those sends them.


@dataclass(frozen=True, slots=True, eq=False)
class MergedDeclarations:
    """Chunks and the ranks that declare them, their owners; a list of rows of several ranks is here once.

    Attributes:
        declared: the rows; `rank` is the only owner, or `ranks + i` for a row that all of `owner_groups[i]`
            declare.
        owner_groups: the ranks that have an equal list, ascending; a rank has at most one such list.
        entities_before: how many entities each rank has before those of its shared list, `[ranks]`.
    """

    declared: DeclaredChunks
    owner_groups: tuple[Ints, ...]
    entities_before: Ints

    @classmethod
    def of_single_owners(cls, declared: DeclaredChunks, *, ranks: int) -> MergedDeclarations:
        """Return declarations with one owner for every row."""
        return cls(declared, (), np.zeros(ranks, np.int64))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.entities_before)

    def take(self, rows: Rows) -> MergedDeclarations:
        """Return the chosen rows."""
        return replace(self, declared=self.declared.take(rows))

    def owners(self) -> tuple[Ints, Ints]:
        """Return all pairs of a row and a rank that declares it, sorted by row and rank: rows and ranks."""
        rows = np.arange(len(self.declared))
        if not self.owner_groups:
            return rows, self.declared.rank
        # `member` lists the owners by the value of `rank`: first the single ranks, then the groups.
        sizes = np.concatenate([np.ones(self.ranks, np.int64), [len(s) for s in self.owner_groups]])
        member = np.concatenate([np.arange(self.ranks), *self.owner_groups])
        first = np.cumsum(sizes) - sizes
        count = sizes[self.declared.rank]
        return np.repeat(rows, count), member[joined_ranges(first[self.declared.rank], count)]

    def entities_of(self, rows: Ints, ranks: Ints) -> Ints:
        """Return the index of each of these rows among the entities of one of its owners."""
        is_shared = self.declared.rank[rows] >= self.ranks
        return self.declared.entity[rows] + np.where(is_shared, self.entities_before[ranks], 0)

    def with_main_rows(self, rows: Ints, ranks: Ints) -> MergedDeclarations:
        """Append these rows once more as main replicas, row i of `ranks[i]`, which is one of its owners."""
        appended = np.concatenate([np.arange(len(self.declared)), rows])
        more, count = self.declared.take(appended), len(self.declared)  # copies of the columns
        more.entity[count:] = self.entities_of(rows, ranks)
        more.main[count:], more.rank[count:] = True, ranks
        return replace(self, declared=more)

    def expanded(self) -> DeclaredChunks:
        """Return one row for each owner of each row, in the order of ranks: long, to describe faults."""
        rows, rank = self.owners()
        # Stable, so the rows of one rank keep their order.
        order = np.argsort(rank, kind="stable")
        rows, rank = rows[order], rank[order]
        return replace(self.declared.take(rows), rank=rank, entity=self.entities_of(rows, rank))


@dataclass(frozen=True, slots=True, eq=False)
class PackedDeclarations:
    """What one rank declares, as two packed lists of rows.

    Attributes:
        entities: the entity of each row of the first list, then of the second, `[n]`.
        main_rows: the rows of main replicas.
        replica_rows: the other rows; equal on ranks that declare the same replicas.
    """

    entities: Ints
    main_rows: bytes
    replica_rows: bytes


REPLICATED_VALUE, ON_SOME_RANKS = 1, 2
"""Marks of rows, to be combined. The array is a replicated value, whose main replica the planner chooses. The
array lies on a mesh of only some ranks, so other ranks may declare copies of it as main replicas."""


def pack_declarations(
    declared: DeclaredChunks, *, replicated: Set[str], on_some_ranks: Set[str]
) -> PackedDeclarations:
    """Pack the declarations of one rank.

    Args:
        declared: the rows of one rank.
        replicated: keys of arrays whose rows get the mark REPLICATED_VALUE.
        on_some_ranks: keys of arrays whose rows get the mark ON_SOME_RANKS.
    """
    keys = [a.key for a in declared.table.arrays]
    marks = np.array(
        [REPLICATED_VALUE * (k in replicated) | ON_SOME_RANKS * (k in on_some_ranks) for k in keys]
    )
    marks = marks.astype(np.int64)[declared.table.array]
    # The main replica of a replicated value is not known yet, so its rows travel with the replicas.
    is_main = declared.main & (marks & REPLICATED_VALUE == 0)
    main, replica = np.flatnonzero(is_main), np.flatnonzero(~is_main)
    return PackedDeclarations(
        declared.entity[np.concatenate((main, replica))],
        _packed(declared.table.take(main), marks[main]),
        _packed(declared.table.take(replica), marks[replica]),
    )


def _packed(table: ChunkTable, marks: Ints) -> bytes:
    """Return a head (rows, dims, lengths of the specs), the matrix of rows, and the specs of used arrays."""
    # Only arrays that have a row are sent, numbered from 0.
    used, number = np.unique(table.array, return_inverse=True)
    specs = [_packed_spec(table.arrays[i]) for i in used.tolist()]
    matrix = np.column_stack(
        (number, table.flat_start, table.flat_stop, table.nbytes, marks, table.start, table.shape)
    )
    head = np.array([len(table), table.dims, len(specs), *(len(s) for s in specs)], np.int64)
    return head.tobytes() + matrix.astype(np.int64).tobytes() + b"".join(specs)


def _packed_spec(spec: ArraySpec) -> bytes:
    return f"{spec.dtype} {','.join(map(str, spec.global_shape))} {spec.key}".encode()


def _unpacked_spec(packed: bytes) -> ArraySpec:
    dtype, shape, key = packed.decode().split(" ", 2)
    return ArraySpec(key, dtype, tuple(int(n) for n in shape.split(",") if n))


class _UnpackedRows(NamedTuple):
    """The lists that `_packed` wrote, joined; the specs of arrays are numbered over all lists.

    Attributes:
        specs: the different specs, in the order in which they were found.
        array: for each list, the index into specs of each of its rows.
        matrix: the other columns of all rows, `[n, 5 + 2 * dims]`; see `_packed`.
        counts: number of rows of each list.
        dims: number of dims of the widest list.
    """

    specs: list[ArraySpec]
    array: list[Ints]
    matrix: Ints
    counts: Ints
    dims: int


def _unpack(lists: Sequence[bytes]) -> _UnpackedRows:
    heads = [np.frombuffer(packed, np.int64, 3) for packed in lists]
    widest = max((int(head[1]) for head in heads), default=1)
    number_of_spec: dict[bytes, int] = {}
    known: dict[bytes, list[int]] = {}  # ranks of a pipeline stage have equal lists of specs
    array, matrices = [], []
    for packed, head in zip(lists, heads, strict=True):
        # A list is: 3 numbers, the lengths of its specs, the matrix, the specs. Nothing is copied to read it.
        rows, dims, specs = head.tolist()
        width, at = 5 + 2 * dims, 8 * (3 + specs)
        matrix = np.frombuffer(packed, np.int64, rows * width, at).reshape(rows, width)
        packed_specs = packed[24:at] + packed[at + matrix.nbytes :]
        numbers = known.get(packed_specs)
        if numbers is None:
            numbers = known[packed_specs] = _spec_numbers(packed_specs, specs, number_of_spec)
        array.append(np.array(numbers, np.int64)[matrix[:, 0]])
        matrices.append(matrix if dims == widest else _widened(matrix, dims, widest))
    return _UnpackedRows(
        specs=[_unpacked_spec(packed) for packed in number_of_spec],
        array=array,
        matrix=np.concatenate([np.zeros((0, 5 + 2 * widest), np.int64), *matrices]),
        counts=np.array([head[0] for head in heads], np.int64),
        dims=widest,
    )


def _spec_numbers(packed_specs: bytes, count: int, number_of_spec: dict[bytes, int]) -> list[int]:
    """Return the number of each of `count` specs; one that no list had before is added with the next number.

    packed_specs is the lengths of the specs, then the specs.
    """
    numbers, at = [], 8 * count
    for length in np.frombuffer(packed_specs, np.int64, count).tolist():
        numbers.append(number_of_spec.setdefault(packed_specs[at : at + length], len(number_of_spec)))
        at += length
    return numbers


def merge_packed_declarations(
    main_rows: Sequence[bytes], replica_rows: Sequence[bytes], owner_groups: Sequence[Ints]
) -> tuple[MergedDeclarations, Ints]:
    """Merge the packed declarations of all ranks into one table with one list of arrays.

    Args:
        main_rows: those of each rank.
        replica_rows: the different ones, each once.
        owner_groups: for each of these, the ranks that have it, ascending.

    Returns:
        The merged declarations, whose `entity` counts the rows of the two lists of a rank one after the
        other, and the marks of the rows, `[n]`.

    Raises:
        MismatchError: ranks give different dtypes or global shapes for a key. All such keys are listed, with
            ranks.
        FormatError: a chunk does not lie in its array.
    """
    packed = _unpack([*main_rows, *replica_rows])
    specs, matrix, dims = packed.specs, packed.matrix, packed.dims
    if len({s.key for s in specs}) < len(specs):
        single_owners = [np.array([rank], np.int64) for rank in range(len(main_rows))]
        raise _conflict(specs, packed.array, [*single_owners, *owner_groups])
    # Arrays are sorted by key, so their numbers change from the order of discovery to that of keys.
    order = sorted(range(len(specs)), key=lambda i: specs[i].key)
    sorted_number = np.empty(len(specs), np.int64)
    sorted_number[order] = np.arange(len(specs))
    # A packed row has number, flat start and stop, nbytes, marks, then start and shape; see `_packed`.
    table = ChunkTable(
        tuple(specs[i] for i in order),
        sorted_number[np.concatenate([np.zeros(0, np.int64), *packed.array])],
        matrix[:, 5 : 5 + dims],
        matrix[:, 5 + dims :],
        *matrix[:, 1:4].T,
    )
    # List i belongs to rank i as long as it is one of main rows; after these, to owner group i - ranks.
    owner = np.repeat(np.arange(len(packed.counts)), packed.counts)
    _check_inside(table, owner, ranks=len(main_rows), owner_groups=owner_groups)
    is_main, no = owner < len(main_rows), np.zeros(len(table), np.bool_)
    declared = DeclaredChunks(table, is_main, no, owner, joined_ranges(0, packed.counts))
    merged = MergedDeclarations(declared, tuple(owner_groups), packed.counts[: len(main_rows)])
    return merged, matrix[:, 4]


def _widened(matrix: Ints, own_dims: int, dims: int) -> Ints:
    """Pad the starts of packed rows with 0 and their extents with 1, up to `dims` dims."""
    wide = np.ones((len(matrix), 5 + 2 * dims), np.int64)
    wide[:, : 5 + own_dims] = matrix[:, : 5 + own_dims]
    wide[:, 5 + own_dims : 5 + dims] = 0
    wide[:, 5 + dims : 5 + dims + own_dims] = matrix[:, 5 + own_dims :]
    return wide


def _check_inside(table: ChunkTable, owner: Ints, *, ranks: int, owner_groups: Sequence[Ints]) -> None:
    decoded = DecodedArrays(table.arrays, table.padded_global_shape(), itemsizes(table.arrays))
    try:
        table.check(decoded, "declarations")
    except FormatError:
        for at in np.unique(owner).tolist():  # slow, to name the rank
            rank = at if at < ranks else int(owner_groups[at - ranks][0])
            table.take(owner == at).check(decoded, f"declarations of rank {rank}")
        raise


def _conflict(specs: Sequence[ArraySpec], arrays: Sequence[Ints], owners: Sequence[Ints]) -> Exception:
    """Return the error that lists which ranks give which dtype and shape to the keys that have several."""
    specs_of_key: dict[str, int] = {}
    for spec in specs:
        specs_of_key[spec.key] = specs_of_key.get(spec.key, 0) + 1
    # Ranks declare an array if one of their rows uses its spec.
    versions: dict[str, dict[ArraySpec, set[int]]] = {}
    for used, ranks in zip(arrays, owners, strict=True):
        for i in np.unique(used).tolist():
            if specs_of_key[specs[i].key] > 1:
                versions.setdefault(specs[i].key, {}).setdefault(specs[i], set()).update(ranks.tolist())
    return conflict_error(
        {key: {spec: sorted(ranks) for spec, ranks in by_spec.items()} for key, by_spec in versions.items()}
    )
