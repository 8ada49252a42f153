"""Which ranks of a simulated job have which parameters: the groups of its replicas, by stage.

They are computed from a model and a layout. Ranks with the same parameters, such as data-parallel ranks, are
one `ReplicaGroup`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megackpt.cli.simulation.arrays import JobArrays, Model, Weight, padded_rows
from megackpt.cli.simulation.layout import expert_replica_ranks, layers_of_stages, replica_ranks
from megackpt.cli.simulation.replica_group import BucketedParameters, Flags, Parts, ReplicaGroup
from megackpt.plans.geometry import Ints
from megackpt.training.optim.ranges import plan_buffer
from megackpt.training.parallel import ParallelLayout

BUCKET_SIZE = 40_000_000
"""Elements of a bucket of the distributed optimizer; its default."""


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
    job = _Job(model, layout, arrays, bucket_size)
    return [
        job.groups_of_stage(pp, _of_stage(model, layers[pp], is_first=pp == 0, is_last=pp == layout.pp - 1))
        for pp in range(layout.pp)
    ]


def data_parallel_groups(
    stage: Sequence[ReplicaGroup],
) -> list[tuple[ReplicaGroup, list[tuple[ReplicaGroup, Ints]]]]:
    """Return each group without experts, and with it the groups that have the experts of its ranks.

    With a group of experts come the ranks that are in both groups. If etp differs from tp, these are only
    some of its ranks.
    """
    dense = [group for group in stage if not group.has_experts]
    experts = [group for group in stage if group.has_experts]
    pairs = []
    for group in dense:
        both = [(other, np.intersect1d(group.ranks, other.ranks)) for other in experts]
        pairs.append((group, [(other, ranks) for other, ranks in both if len(ranks)]))
    return pairs


@dataclass(frozen=True, slots=True)
class _StageParameter:
    """A parameter of a stage: its leading axes `(index, total)`, and whether it is the one that is saved."""

    weight: Weight
    leading: tuple[tuple[int, int], ...] = ()
    is_copy: bool = False


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


class _PartRow(NamedTuple):
    """A row of `Parts`, whose fields these are."""

    param: int
    arrays: list[int]
    start: list[int]
    shape: list[int]
    offset: int
    numel: int
    experts: int
    stride: int
    main: bool
    resizable: bool
    trained: bool

    @classmethod
    def columns_of(cls, rows: Sequence[_PartRow], arrays: JobArrays) -> Parts:
        """Put rows into columns, which have their widths also if there are no rows."""
        widths = {"arrays": (1 + len(arrays.states),), "start": (arrays.dims,), "shape": (arrays.dims,)}
        columns: dict[str, npt.NDArray[Any]] = {}
        for i, name in enumerate(cls._fields):
            kind = np.bool_ if name in ("main", "resizable", "trained") else np.int64
            columns[name] = np.array([row[i] for row in rows], kind).reshape(len(rows), *widths.get(name, ()))
        return Parts(**columns)


@dataclass(frozen=True, slots=True)
class _Job:
    """A model at a layout, the arrays of the job, and the elements of a bucket of its optimizer."""

    model: Model
    layout: ParallelLayout
    arrays: JobArrays
    bucket_size: int

    def groups_of_stage(self, pp: int, params: Iterable[_StageParameter]) -> list[ReplicaGroup]:
        """Return the groups without experts, by TP rank, then those with experts."""
        layout, params = self.layout, list(params)
        dense = [param for param in params if not param.weight.experts]
        experts = [param for param in params if param.weight.experts]
        groups = [
            self._group(dense, _Shard((tp, layout.tp)), replica_ranks(layout, tp=tp, pp=pp))
            for tp in range(layout.tp)
        ]
        for ep, etp in itertools.product(range(layout.ep if experts else 0), range(layout.etp)):
            shard = _Shard((etp, layout.etp), (ep, layout.ep))
            groups.append(self._group(experts, shard, expert_replica_ranks(layout, etp=etp, ep=ep, pp=pp)))
        return groups

    def _group(self, params: Sequence[_StageParameter], shard: _Shard, ranks: Ints) -> ReplicaGroup:
        """Cut the parameters of a stage, find their boxes in the arrays, and pack them for the optimizer."""
        rows_of_params = [list(self._rows(number, param, shard)) for number, param in enumerate(params)]
        # An optimizer does not know a buffer.
        numels = [sum(row.numel for row in rows if row.trained) for rows in rows_of_params]
        step, step_start, step_main = self._steps(params, shard)
        return ReplicaGroup(
            ranks=ranks,
            parts=_PartRow.columns_of(list(itertools.chain(*rows_of_params)), self.arrays),
            step=step,
            step_start=step_start,
            step_main=step_main,
            packed=BucketedParameters.of(plan_buffer(numels, dp=len(ranks), bucket_size=self.bucket_size)),
            has_experts=any(param.weight.experts for param in params),
        )

    def _rows(self, number: int, param: _StageParameter, shard: _Shard) -> Iterator[_PartRow]:
        """Yield the local parts of a parameter, which is the one of this number in its stage."""
        weight, index = param.weight, [i for i, _ in param.leading]
        boxes = [_local_box(weight, name, extent, shard, self.model) for name, extent in weight.parts]
        count = weight.experts // shard.ep[1] if weight.experts else 1
        stride = sum(math.prod(shape) for _, shape, _ in boxes) // count
        offset = 0
        for (name, _), (start, shape, is_first_copy) in zip(weight.parts, boxes, strict=True):
            numel = math.prod(shape)
            fill = self.arrays.dims - len(index) - len(shape)
            yield _PartRow(
                param=number,
                arrays=self.arrays.of_part(weight, name),
                start=[*index, *start, *([0] * fill)],
                shape=[*([1] * len(index)), *shape, *([1] * fill)],
                offset=offset,
                numel=numel,
                experts=count,
                stride=stride,
                main=is_first_copy and not param.is_copy,
                resizable=weight.is_vocabulary,
                trained=weight.is_trained,
            )
            offset += numel // count

    def _steps(self, params: Sequence[_StageParameter], shard: _Shard) -> tuple[Ints, Ints, Flags]:
        """Return the parameters' counts of updates, as the fields of `ReplicaGroup` have them."""
        dims = self.arrays.dims
        if not self.arrays.states:
            params = ()
        step = [self.arrays.step_of(p.weight) if p.weight.is_trained else -1 for p in params]
        start = [[*(i for i, _ in p.leading), *([0] * (dims - len(p.leading)))] for p in params]
        # The other slices, and the other experts, have the same count.
        is_first = shard.tp[0] == shard.ep[0] == 0
        main = [is_first and not p.is_copy for p in params]
        return (
            np.array(step, np.int64),
            np.array(start, np.int64).reshape(len(step), dims),
            np.array(main, np.bool_),
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
