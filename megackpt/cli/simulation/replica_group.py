"""Ranks of a simulated job with the same parameters, and what they declare, in columns.

What is equal on them is computed once, and the flat ranges of the distributed optimizer, which differ, for
all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megackpt.cli.simulation.arrays import JobArrays
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable, DeclaredChunks, itemsizes
from megackpt.plans.metadata.merge import merge_declarations
from megackpt.training.optim.ranges import BufferLayout

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts of local parameters, `[p]` rows; each is a box of an array of its own.

    Attributes:
        param: the parameter each belongs to.
        arrays: numbers of the part's array and of those of its states, `[p, 1 + states]`.
        start: first element of the box, `[p, dims]`.
        shape: its extents, `[p, dims]`.
        offset: where it begins in the flattened local parameter, in elements; in that of one expert, where
            several experts are stacked.
        numel: its elements.
        experts: how many are stacked; 1 if none are.
        stride: elements of the local parameter, of one expert.
        main: whether these ranks, and not others, hold what is saved.
        resizable: whether the global shape depends on tp.
        trained: whether an optimizer has state for it.
    """

    param: Ints
    arrays: Ints
    start: Ints
    shape: Ints
    offset: Ints
    numel: Ints
    experts: Ints
    stride: Ints
    main: Flags
    resizable: Flags
    trained: Flags

    def position(self, of_param: Ints) -> Ints:
        """Return how many elements of each part precede an element of its flattened parameter, `[d, p]`."""
        of_expert = self.numel // self.experts
        expert, inside = np.divmod(of_param, self.stride)
        positions: Ints = expert * of_expert + np.clip(inside - self.offset, 0, of_expert)
        return positions


@dataclass(frozen=True, slots=True, eq=False)
class BucketedParameters:
    """Parameters in flat buckets that ranks own equal slices of, `[m]` rows.

    Attributes:
        first: first element of the parameter in the buffer.
        last: one past its last.
        bucket: first element of its bucket.
        slice: elements of that bucket that each rank owns.
    """

    first: Ints
    last: Ints
    bucket: Ints
    slice: Ints

    @classmethod
    def of(cls, buffer: BufferLayout) -> BucketedParameters:
        """Put a layout into columns."""
        bucket = np.array(buffer.bucket_of_param, np.int64)
        start = np.array([bucket.start for bucket in buffer.buckets], np.int64)
        length = np.array([bucket.numel // buffer.dp for bucket in buffer.buckets], np.int64)
        first, last = (
            np.array([getattr(param, end) for param in buffer.params], np.int64) for end in ("start", "stop")
        )
        return cls(first, last, start[bucket], length[bucket])

    def owned(self, members: Ints) -> tuple[Ints, Ints]:
        """Return the range of each parameter that ranks own, `[members, m]` twice; empty ones are (0, 0)."""
        begin = self.bucket + members[:, None] * self.slice
        low = np.maximum(begin, self.first) - self.first
        high = np.minimum(begin + self.slice, self.last) - self.first
        empty = low >= high
        return np.where(empty, 0, low), np.where(empty, 0, high)


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGroup:
    """Parameters that several ranks hold, and that an optimizer shards over these ranks.

    Attributes:
        ranks: the ranks, in the order in which they own slices, `[d]`.
        parts: the parameters' parts.
        step: number of each parameter's array of counts, `[m]`; -1 for a buffer; empty without an optimizer.
        step_start: where its count stands there, `[m, dims]`.
        step_main: whether it is these ranks' that is saved, `[m]`.
        packed: how the parameters are packed, and the slices of these ranks.
        has_experts: whether they are parameters of experts.
    """

    ranks: Ints
    parts: Parts
    step: Ints
    step_start: Ints
    step_main: Flags
    packed: BucketedParameters
    has_experts: bool

    def declare(self, arrays: JobArrays, members: Ints) -> DeclaredChunks:
        """Return what some of the ranks declare, by their positions in `ranks`. Pure.

        Slots are left 0; see `joined`.
        """
        tables = [self._params(arrays, members), *self._states(arrays, members)]
        return _joined(arrays, tables)

    def boxes(self, arrays: JobArrays) -> _GroupDeclarations:
        """Return the boxes of everything that these ranks hold together, as one rank would declare them."""
        # Every part in each of its arrays; what is not trained is in the first one only.
        exists = self.parts.trained[:, None] | (np.arange(self.parts.arrays.shape[1]) == 0)
        whole, (rows, _) = self.parts.arrays[exists], np.nonzero(exists)
        has_step = self.step >= 0
        steps, start = self.step[has_step], self.step_start[has_step]
        numel, ones, shape = self.parts.numel[rows], np.ones_like(steps), np.ones_like(start)
        boxes = _Rows(whole, self.parts.start[rows], self.parts.shape[rows], np.zeros_like(numel), numel)
        counts = _Rows(steps, start, shape, ones - 1, ones)
        resizable = np.concatenate([self.parts.resizable[rows], np.zeros(len(ones), np.bool_)])
        none = np.zeros(len(resizable), np.int64)
        return _GroupDeclarations(_stacked([boxes, counts]), none.astype(np.bool_), resizable, none)

    def _params(self, arrays: JobArrays, members: Ints) -> _GroupDeclarations:
        parts = self.parts
        row, member = _pairs(len(parts.param), members)
        numel = parts.numel[row]
        rows = _Rows(parts.arrays[row, 0], parts.start[row], parts.shape[row], np.zeros_like(numel), numel)
        main = parts.main[row] & (member == 0)
        return _GroupDeclarations(rows, main, parts.resizable[row], self.ranks[member])

    def _states(self, arrays: JobArrays, members: Ints) -> Iterator[_GroupDeclarations]:
        if not len(self.step):
            return
        low, high = self.packed.owned(members)  # [d, m]
        parts = self.parts
        start, stop = parts.position(low[:, parts.param]), parts.position(high[:, parts.param])  # [d, p]
        at, row = np.nonzero(start < stop)
        begin, end = start[at, row], stop[at, row]
        for state in range(1, parts.arrays.shape[1]):
            rows = _Rows(parts.arrays[row, state], parts.start[row], parts.shape[row], begin, end)
            yield _GroupDeclarations(rows, parts.main[row], parts.resizable[row], self.ranks[members[at]])
        at, param = np.nonzero(low < high)
        ones = np.ones_like(param)
        rows = _Rows(
            self.step[param],
            self.step_start[param],
            np.ones_like(self.step_start[param]),
            ones - 1,
            ones,
        )
        # Of the ranks with a part of the parameter, the one with its first element speaks for it.
        main = self.step_main[param] & (low[at, param] == 0)
        yield _GroupDeclarations(rows, main, np.zeros(len(param), np.bool_), self.ranks[members[at]])


def boxes_of(groups: Sequence[ReplicaGroup], arrays: JobArrays) -> DeclaredChunks:
    """Return everything that groups hold together, as one rank would declare it. Pure."""
    return joined([_joined(arrays, [group.boxes(arrays) for group in groups])])


def joined(declared: Sequence[DeclaredChunks]) -> DeclaredChunks:
    """Merge the declarations of one job, in the order of ranks, and number the entities of each rank."""
    merged = merge_declarations(declared)
    # Rows come table by table, each with all ranks. A stable sort gives each rank's rows in their order.
    if len(merged) and (np.diff(merged.rank) < 0).any():
        merged = merged.take(np.argsort(merged.rank, kind="stable"))
    # Rows begins[i] : begins[i] + counts[i] are of one rank, and entities of each rank count from 0.
    begins = np.flatnonzero(np.diff(merged.rank, prepend=-1))
    counts = np.diff(np.append(begins, len(merged)))
    return replace(merged, entity=np.arange(len(merged)) - np.repeat(begins, counts))


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Chunks in columns, without their sizes."""

    array: Ints
    start: Ints
    shape: Ints
    flat_start: Ints
    flat_stop: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _GroupDeclarations:
    rows: _Rows
    main: Flags
    resizable: Flags
    rank: Ints


def _pairs(rows: int, members: Ints) -> tuple[Ints, Ints]:
    """All rows for each member, member by member."""
    return np.tile(np.arange(rows), len(members)), np.repeat(members, rows)


def _joined(arrays: JobArrays, declared: Sequence[_GroupDeclarations]) -> DeclaredChunks:
    table = _table(arrays, [d.rows for d in declared])
    return DeclaredChunks(
        table,
        np.concatenate([d.main for d in declared]),
        np.concatenate([d.resizable for d in declared]),
        np.concatenate([d.rank for d in declared]),
        np.zeros(len(table), np.int64),
    )


def _table(arrays: JobArrays, rows: Sequence[_Rows]) -> ChunkTable:
    all_rows = _stacked(rows)
    return ChunkTable(
        arrays.specs,
        all_rows.array,
        all_rows.start,
        all_rows.shape,
        all_rows.flat_start,
        all_rows.flat_stop,
        (all_rows.flat_stop - all_rows.flat_start) * itemsizes(arrays.specs)[all_rows.array],
    )


def _stacked(rows: Sequence[_Rows]) -> _Rows:
    return _Rows(*(np.concatenate([getattr(r, name) for r in rows]) for name in _Rows.__slots__))
