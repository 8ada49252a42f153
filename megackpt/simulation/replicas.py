"""Which ranks of a simulated job have which parameters: the groups of its replicas, by stage.

They are computed from a model and a layout. Ranks with the same parameters, such as data-parallel ranks, are
one `ReplicaGroup`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints
from megackpt.optim.ranges import plan_buffer
from megackpt.parallel import ParallelLayout
from megackpt.simulation.arrays import JobArrays, padded_rows
from megackpt.simulation.layout import expert_replica_ranks, layers_of_stages, replica_ranks
from megackpt.simulation.model import Model, Weight
from megackpt.simulation.replica_group import BucketedParameters, Parts, ReplicaGroup

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
