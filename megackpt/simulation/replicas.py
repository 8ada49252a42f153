"""The declarations of the ranks of a simulated job, in columns.

They are computed from a model and a layout. Ranks with the same parameters, such as data-parallel ranks,
are one `ReplicaGroup`: what is equal on them is computed once, and the flat ranges of the distributed
optimizer, which differ, for all of them at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints
from megackpt.metadata import ChunkTable, DeclaredChunks, itemsizes, merge_declarations
from megackpt.optim.ranges import BufferLayout, plan_buffer
from megackpt.parallel import ParallelLayout
from megackpt.simulation.arrays import JobArrays, padded_rows
from megackpt.simulation.layout import expert_replica_ranks, layers_of_stages, replica_ranks
from megackpt.simulation.model import Model, Weight

BUCKET_SIZE = 40_000_000
"""Elements of a bucket of the distributed optimizer; its default."""

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


@dataclass(frozen=True, slots=True)
class _Shard:
    """Which slice of parameters a group of ranks has: its index and the number of slices.

    In experts, tp is etp, and ep says which of the experts they are; elsewhere ep is `(0, 1)`.
    """

    tp: tuple[int, int]
    ep: tuple[int, int] = (0, 1)


def replica_groups(
    model: Model, layout: ParallelLayout, arrays: JobArrays, *, bucket_size: int = BUCKET_SIZE
) -> list[list[ReplicaGroup]]:
    """Return what ranks have, by stage. A rank is in one group of its stage, or in two with experts. Pure.

    Raises:
        DeclarationError: there are more stages than layers.
    """
    layers = layers_of_stages(model.layers, layout, ends_count=model.ends_count_as_layers)
    stages: list[list[ReplicaGroup]] = []
    for pp in range(layout.pp):
        params = list(_of_stage(model, layers[pp], is_first=pp == 0, is_last=pp == layout.pp - 1))
        dense = [param for param in params if not param.weight.experts]
        experts = [param for param in params if param.weight.experts]
        groups = [
            _shard(
                dense,
                _Shard((tp, layout.tp)),
                model,
                arrays,
                replica_ranks(layout, tp=tp, pp=pp),
                bucket_size,
            )
            for tp in range(layout.tp)
        ]
        for ep, etp in itertools.product(range(layout.ep if experts else 0), range(layout.etp)):
            shard, ranks = (
                _Shard((etp, layout.etp), (ep, layout.ep)),
                expert_replica_ranks(layout, etp=etp, ep=ep, pp=pp),
            )
            groups.append(_shard(experts, shard, model, arrays, ranks, bucket_size))
        stages.append(groups)
    return stages


def data_parallel_groups(
    stage: Sequence[ReplicaGroup],
) -> list[tuple[ReplicaGroup, list[tuple[ReplicaGroup, Ints]]]]:
    """Return each group without experts, and with it the groups that have the experts of its ranks.

    Of each of those, the ranks that are in both are returned, too: some of its ranks only, where etp differs
    from tp.
    """
    dense = [group for group in stage if not group.has_experts]
    experts = [group for group in stage if group.has_experts]
    pairs = []
    for group in dense:
        both = [(other, np.intersect1d(group.ranks, other.ranks)) for other in experts]
        pairs.append((group, [(other, ranks) for other, ranks in both if len(ranks)]))
    return pairs


def boxes_of(groups: Sequence[ReplicaGroup], arrays: JobArrays) -> DeclaredChunks:
    """Return everything that groups hold together, as one rank would declare it. Pure."""
    return joined([_joined(arrays, [group.boxes(arrays) for group in groups])])


def joined(declared: Sequence[DeclaredChunks]) -> DeclaredChunks:
    """Merge the declarations of one job, in the order of ranks, and number the entities of each rank."""
    merged = merge_declarations(declared)
    if len(merged) and (np.diff(merged.rank) < 0).any():
        merged = merged.take(np.argsort(merged.rank, kind="stable"))
    begins = np.flatnonzero(np.diff(merged.rank, prepend=-1))
    counts = np.diff(np.append(begins, len(merged)))
    return replace(merged, entity=np.arange(len(merged)) - np.repeat(begins, counts))


@dataclass(frozen=True, slots=True)
class _StageParameter:
    """A parameter of a stage: its leading axes `(index, total)`, and whether it is the one that is saved."""

    weight: Weight
    leading: tuple[tuple[int, int], ...] = ()
    is_copy: bool = False


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


def _of_stage(
    model: Model, owned: Sequence[int], *, is_first: bool, is_last: bool
) -> Iterator[_StageParameter]:
    """Yield the parameters of a stage in order of registration."""
    if is_first:
        yield from (_StageParameter(weight) for weight in model.first)
    begins = np.cumsum([0, *(stack.layers for stack in model.stacks)])
    for layer in owned:
        number = int(np.searchsorted(begins, layer, side="right")) - 1
        stack = model.stacks[number]
        leading = ((layer - int(begins[number]), stack.layers),) if stack.has_axis else ()
        yield from (_StageParameter(weight, leading) for weight in stack.weights)
    if is_last:
        yield from (_StageParameter(weight) for weight in model.last)
        if model.shared is not None and not is_first:
            yield _StageParameter(model.shared, is_copy=True)


def _shard(
    params: Sequence[_StageParameter],
    shard: _Shard,
    model: Model,
    arrays: JobArrays,
    ranks: Ints,
    bucket_size: int,
) -> ReplicaGroup:
    """Cut the parameters of a stage, find their boxes in the arrays, and pack them for the optimizer."""
    dims = arrays.dims
    rows: list[tuple[int, list[int], list[int], list[int], int, int, int, int, bool, bool, bool]] = []
    numels, step, step_start, step_main = [], [], [], []
    for at, param in enumerate(params):
        weight, index = param.weight, [i for i, _ in param.leading]
        boxes = [_local_box(weight, name, extent, shard, model) for name, extent in weight.parts]
        count = weight.experts // shard.ep[1] if weight.experts else 1
        stride = sum(math.prod(shape) for _, shape, _ in boxes) // count
        offset = 0
        for (name, _), (start, shape, is_first_copy) in zip(weight.parts, boxes, strict=True):
            numel = math.prod(shape)
            fill = dims - len(index) - len(shape)
            rows.append(
                (
                    at,
                    arrays.of_part(weight, name),
                    [*index, *start, *([0] * fill)],
                    [*([1] * len(index)), *shape, *([1] * fill)],
                    offset,
                    numel,
                    count,
                    stride,
                    is_first_copy and not param.is_copy,
                    weight.is_vocabulary,
                    weight.is_trained,
                )
            )
            offset += numel // count
        numels.append(count * stride if weight.is_trained else 0)  # an optimizer does not know a buffer
        if arrays.states:
            step.append(arrays.step_of(weight) if weight.is_trained else -1)
            step_start.append([*index, *([0] * (dims - len(index)))])
            # The other slices, and the other experts, have the same count.
            step_main.append(not param.is_copy and shard.tp[0] == shard.ep[0] == 0)
    columns = list(zip(*rows, strict=True)) or [()] * 11
    kinds: list[type] = [np.int64] * 8 + [np.bool_] * 3
    width = {1: 1 + len(arrays.states), 2: dims, 3: dims}
    made: list[npt.NDArray[Any]] = [
        np.array(column, kind).reshape((len(rows), width[i]) if i in width else (len(rows),))
        for i, (column, kind) in enumerate(zip(columns, kinds, strict=True))
    ]
    return ReplicaGroup(
        ranks=ranks,
        parts=Parts(*made),
        step=np.array(step, np.int64),
        step_start=np.array(step_start, np.int64).reshape(len(step), dims),
        step_main=np.array(step_main, np.bool_),
        packed=BucketedParameters.of(plan_buffer(numels, dp=len(ranks), bucket_size=bucket_size)),
        has_experts=any(param.weight.experts for param in params),
    )


def _local_box(
    weight: Weight, name: str, extent: int, shard: _Shard, model: Model
) -> tuple[list[int], list[int], bool]:
    """Return start and shape of a part's local box, and whether this is the first slice that has it."""
    tp, tp_size = shard.tp
    shape = [padded_rows(weight, extent, model, tp_size), *weight.inner]
    start = [0] * len(shape)
    is_first_copy = tp == 0
    if weight.tp_dim is not None:
        copies = model.copies_of(name, tp=tp_size)
        shape[weight.tp_dim] = shape[weight.tp_dim] * copies // tp_size
        start[weight.tp_dim] = tp // copies * shape[weight.tp_dim]
        is_first_copy = tp % copies == 0
    if weight.experts:
        ep, ep_size = shard.ep
        count = weight.experts // ep_size
        return [ep * count, *start], [count, *shape], is_first_copy
    return start, shape, is_first_copy


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
