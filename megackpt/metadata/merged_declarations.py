"""What all ranks declare, as the rank that plans a save learns it: equal lists once.

Owns the lists of rows that ranks send, packed so that those of many thousand ranks are put together in
arrays, and the table made of them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from megackpt.errors import FormatError
from megackpt.geometry import Ints, joined_ranges
from megackpt.metadata.chunk_table import ArraySpec, ChunkTable, DecodedArrays, Rows, itemsizes
from megackpt.metadata.declarations import DeclaredChunks, conflict_error


@dataclass(frozen=True, slots=True, eq=False)
class MergedDeclarations:
    """Chunks held by ranks; a list of rows that several ranks have alike stands here once.

    Attributes:
        declared: the rows; `rank` is that of the one holder, or `ranks + i` for a row that all of
            `owner_groups[i]` hold.
        owner_groups: ranks that have a list alike, ascending; a rank has at most one such list.
        slots_before: how many entities each rank has before those of its shared list, `[ranks]`.
    """

    declared: DeclaredChunks
    owner_groups: tuple[Ints, ...]
    entities_before: Ints

    @classmethod
    def of_single_owners(cls, declared: DeclaredChunks, *, ranks: int) -> MergedDeclarations:
        """Take rows each of which has its one holder."""
        return cls(declared, (), np.zeros(ranks, np.int64))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.entities_before)

    def take(self, rows: Rows) -> MergedDeclarations:
        """Return the chosen rows."""
        return replace(self, declared=self.declared.take(rows))

    def owners(self) -> tuple[Ints, Ints]:
        """Return pairs of a row and a rank that holds it: rows, ascending, and ranks, ascending in each."""
        rows = np.arange(len(self.declared))
        if not self.owner_groups:
            return rows, self.declared.rank
        sizes = np.concatenate([np.ones(self.ranks, np.int64), [len(s) for s in self.owner_groups]])
        member = np.concatenate([np.arange(self.ranks), *self.owner_groups])
        first = np.cumsum(sizes) - sizes
        count = sizes[self.declared.rank]
        return np.repeat(rows, count), member[joined_ranges(first[self.declared.rank], count)]

    def entities_of(self, rows: Ints, ranks: Ints) -> Ints:
        """Return the entity that each of these rows has on one of its holders."""
        shared = self.declared.rank[rows] >= self.ranks
        return self.declared.entity[rows] + np.where(shared, self.entities_before[ranks], 0)

    def with_main_rows(self, rows: Ints, ranks: Ints) -> MergedDeclarations:
        """Return these rows once more behind the others: one holder of each is its main replica."""
        every = np.concatenate([np.arange(len(self.declared)), rows])
        more, count = self.declared.take(every), len(self.declared)  # copies of the columns
        more.entity[count:] = self.entities_of(rows, ranks)
        more.main[count:], more.rank[count:] = True, ranks
        return replace(self, declared=more)

    def expanded(self) -> DeclaredChunks:
        """Return a row for each holder of each row, in the order of ranks: long, to describe faults."""
        rows, rank = self.owners()
        order = np.argsort(rank, kind="stable")
        rows, rank = rows[order], rank[order]
        return replace(self.declared.take(rows), rank=rank, entity=self.entities_of(rows, rank))


@dataclass(frozen=True, slots=True, eq=False)
class PackedDeclarations:
    """What one rank declares, in two lists.

    Attributes:
        entities: the entity of each row of the first list, then of the second, `[n]`.
        main_rows: the rows of which it is the main replica, packed.
        replica_rows: other rows, packed: equal on ranks that hold the same.
    """

    entities: Ints
    main_rows: bytes
    replica_rows: bytes


REPLICATED_VALUE, ON_SOME_RANKS = 1, 2
"""Marks of rows: the array is a replicated value, whose main replica is to be chosen; it lies on a mesh that
is not all ranks, beside which others may hold copies."""


def pack_declarations(
    declared: DeclaredChunks, *, replicated: Set[str], part_of_ranks: Set[str]
) -> PackedDeclarations:
    """Pack the declarations of one rank; the sets name arrays whose rows get a mark."""
    keys = [a.key for a in declared.table.arrays]
    marks = np.array(
        [REPLICATED_VALUE * (k in replicated) | ON_SOME_RANKS * (k in part_of_ranks) for k in keys]
    )
    marks = marks.astype(np.int64)[declared.table.array]
    alone = declared.main & (marks & REPLICATED_VALUE == 0)
    entities = np.concatenate((np.flatnonzero(alone), np.flatnonzero(~alone)))
    first, second = entities[: alone.sum()], entities[alone.sum() :]
    return PackedDeclarations(
        declared.entity[entities],
        _packed(declared.table.take(first), marks[first]),
        _packed(declared.table.take(second), marks[second]),
    )


def _packed(table: ChunkTable, marks: Ints) -> bytes:
    used, number = np.unique(table.array, return_inverse=True)
    entries = [_entry(table.arrays[i]) for i in used.tolist()]
    matrix = np.column_stack(
        (number, table.flat_start, table.flat_stop, table.nbytes, marks, table.start, table.shape)
    )
    head = np.array([len(table), table.dims, len(entries), *(len(e) for e in entries)], np.int64)
    return head.tobytes() + matrix.astype(np.int64).tobytes() + b"".join(entries)


def _entry(spec: ArraySpec) -> bytes:
    return f"{spec.dtype} {','.join(map(str, spec.global_shape))} {spec.key}".encode()


def _spec(entry: bytes) -> ArraySpec:
    dtype, shape, key = entry.decode().split(" ", 2)
    return ArraySpec(key, dtype, tuple(int(n) for n in shape.split(",") if n))


def merge_packed_declarations(
    alone: Sequence[bytes], shared: Sequence[bytes], owner_groups: Sequence[Ints]
) -> tuple[MergedDeclarations, Ints]:
    """Put the lists of ranks into one table with one list of arrays; return the marks of its rows, too.

    alone has the first list of each rank; shared has the different second ones, and owner_groups the ranks
    that have each. `entity` counts the rows of the two lists of a rank, one after the other.

    Raises:
        MismatchError: ranks give different dtypes or global shapes for a key; all such keys are listed,
            with ranks.
        FormatError: a chunk does not lie in its array.
    """
    messages = [*alone, *shared]
    heads = [np.frombuffer(m, np.int64, 3) for m in messages]
    counts = np.array([h[0] for h in heads], np.int64)
    dims = max((int(h[1]) for h in heads), default=1)
    numbering: dict[bytes, int] = {}
    known: dict[bytes, list[int]] = {}  # ranks of a pipeline stage have equal lists of arrays
    ids, matrices = [], []
    for message, head in zip(messages, heads, strict=True):
        rows, own_dims, arrays = head.tolist()
        width, at = 5 + 2 * own_dims, 8 * (3 + arrays)
        matrix = np.frombuffer(message, np.int64, rows * width, at).reshape(rows, width)
        end = at + matrix.nbytes
        told = message[24:at] + message[end:]
        mine = known.get(told)
        if mine is None:
            mine = known[told] = []
            for length in np.frombuffer(message, np.int64, arrays, 24).tolist():
                mine.append(numbering.setdefault(message[end : end + length], len(numbering)))
                end += length
        ids.append(np.array(mine, np.int64)[matrix[:, 0]])
        matrices.append(matrix if own_dims == dims else _widened(matrix, own_dims, dims))
    specs = [_spec(entry) for entry in numbering]
    order = sorted(range(len(specs)), key=lambda i: specs[i].key)
    if len({s.key for s in specs}) < len(specs):
        holders = [np.array([rank], np.int64) for rank in range(len(alone))]
        raise _conflict(specs, ids, [*holders, *owner_groups])
    place = np.empty(len(specs), np.int64)
    place[order] = np.arange(len(specs))
    joined = np.concatenate([np.zeros((0, 5 + 2 * dims), np.int64), *matrices])
    array = place[np.concatenate([np.zeros(0, np.int64), *ids])]
    arrays_sorted = tuple(specs[i] for i in order)
    table = ChunkTable(
        arrays_sorted, array, joined[:, 5 : 5 + dims], joined[:, 5 + dims :], *joined[:, 1:4].T
    )
    holder = np.repeat(np.arange(len(messages)), counts)
    entity = joined_ranges(0, counts)
    _check_inside(table, holder, ranks=len(alone), owner_groups=owner_groups)
    declared = DeclaredChunks(table, holder < len(alone), np.zeros(len(table), np.bool_), holder, entity)
    return MergedDeclarations(declared, tuple(owner_groups), counts[: len(alone)]), joined[:, 4]


def _widened(matrix: Ints, own_dims: int, dims: int) -> Ints:
    wide = np.ones((len(matrix), 5 + 2 * dims), np.int64)
    wide[:, : 5 + own_dims] = matrix[:, : 5 + own_dims]
    wide[:, 5 + own_dims : 5 + dims] = 0
    wide[:, 5 + dims : 5 + dims + own_dims] = matrix[:, 5 + own_dims :]
    return wide


def _check_inside(table: ChunkTable, holder: Ints, *, ranks: int, owner_groups: Sequence[Ints]) -> None:
    decoded = DecodedArrays(table.arrays, table.padded_global_shape(), itemsizes(table.arrays))
    try:
        table.check(decoded, "declarations")
    except FormatError:
        for at in np.unique(holder).tolist():  # slow, to name the rank
            rank = at if at < ranks else int(owner_groups[at - ranks][0])
            table.take(holder == at).check(decoded, f"declarations of rank {rank}")
        raise


def _conflict(specs: Sequence[ArraySpec], ids: Sequence[Ints], holders: Sequence[Ints]) -> Exception:
    """Say which ranks give which dtype and shape to the keys that have several."""
    seen: dict[str, int] = {}
    for spec in specs:
        seen[spec.key] = seen.get(spec.key, 0) + 1
    versions: dict[str, dict[ArraySpec, set[int]]] = {}
    for used, ranks in zip(ids, holders, strict=True):
        for i in np.unique(used).tolist():
            if seen[specs[i].key] > 1:
                versions.setdefault(specs[i].key, {}).setdefault(specs[i], set()).update(ranks.tolist())
    return conflict_error({key: {s: sorted(r) for s, r in said.items()} for key, said in versions.items()})
