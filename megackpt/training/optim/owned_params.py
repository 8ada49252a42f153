"""What one rank updates: a slice of each bucket, and the ranges of parameters in these slices.

Two views of the same memory, into which a buffer is cut. Gradients and parameters are exchanged slice by
slice; the inner optimizer and the checkpoint work on owned parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from megackpt.errors import DeclarationError
from megackpt.training.optim.buffers import ParamGradBuffer
from megackpt.training.optim.grad_sync import groups_of
from megackpt.training.optim.ranges import FlatRange
from megackpt.training.optim.sharded_state import ParamEntity, replica_of
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.groups import Axis, ParallelGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedSlice:
    """The part of one bucket that this rank updates; tensors are 1-D and of the same length.

    Attributes:
        bucket: index of the bucket in its buffer.
        start: first element of the slice in the buffer.
        data: view into the buffer's parameters.
        grad: view into the buffer's gradients.
        master: what the inner optimizer updates: data itself, or an fp32 copy of it.
    """

    bucket: int
    start: int
    data: Tensor
    grad: Tensor
    master: Tensor

    @property
    def has_copy(self) -> bool:
        """Whether the master weights are stored apart from the parameters."""
        return self.master is not self.data


@dataclass(slots=True, kw_only=True)
class OwnedParam:
    """The part of one parameter that this rank updates; never empty.

    Attributes:
        position: of the parameter among all of the optimizer's, groups in order.
        param: the model's parameter.
        flat_range: the elements that this rank updates, in the flattened parameter.
        data: that range of the parameter, a view.
        grad: that range of its gradient, a view.
        master: what the inner optimizer updates.
        has_copy: whether master is an fp32 copy and not data itself.
        scalars: names of the inner optimizer's states that are one number for the whole parameter.
        arrays: names of those that have neither the shape of the master nor a number for all ranks.
        updates: 0-dim int64, updates so far, where the inner optimizer keeps no `step` of its own.
        lazy: whether the inner optimizer makes the state in the first step.
        fresh: whether the state is a placeholder; only where lazy.
        key: key of the parameter in the model's sharded state dict once that was seen; for errors only.
    """

    position: int
    param: Parameter
    flat_range: FlatRange
    data: Tensor
    grad: Tensor
    master: Tensor
    has_copy: bool
    scalars: frozenset[str] = frozenset()
    arrays: frozenset[str] = frozenset()
    updates: Tensor | None = None
    lazy: bool = False
    fresh: bool = False
    key: str = ""

    def __str__(self) -> str:
        name = repr(self.key) if self.key else f"parameter {self.position}"
        return f"{name} of shape {tuple(self.param.shape)}"


def cut_slices(buffer: ParamGradBuffer, ranges: Sequence[FlatRange]) -> list[OwnedSlice]:
    """Return the slices at these ranges of a buffer, one for each bucket. Local."""
    slices = []
    for bucket, flat_range in enumerate(ranges):
        data, grad = buffer.data[flat_range.as_slice()], buffer.grad[flat_range.as_slice()]
        # Two-byte weights cannot take small updates: those are collected in an fp32 copy.
        master = data.float() if data.dtype.itemsize < 4 else data
        slices.append(OwnedSlice(bucket=bucket, start=flat_range.start, data=data, grad=grad, master=master))
    return slices


def cut_params(
    buffer: ParamGradBuffer,
    slices: Sequence[OwnedSlice],
    ranges: Sequence[FlatRange],
    *,
    positions: Sequence[int],
    shape: Callable[[Tensor, Parameter], Tensor],
) -> Iterator[OwnedParam]:
    """Yield the owned parameters of a buffer. Local.

    Args:
        buffer: the buffer.
        slices: the slices of its buckets that this rank updates.
        ranges: of each parameter, the elements in these slices; empty ranges are left out.
        positions: of the buffer's parameters among all of the optimizer's.
        shape: returns the view of a 1-D range that the inner optimizer gets.
    """
    for index, (param, flat_range) in enumerate(zip(buffer.params, ranges, strict=True)):
        if not flat_range.numel:
            continue
        owned_slice = slices[buffer.layout.bucket_of_param[index]]
        start = buffer.layout.params[index].start + flat_range.start - owned_slice.start
        inside = slice(start, start + flat_range.numel)
        yield OwnedParam(
            position=positions[index],
            param=param,
            flat_range=flat_range,
            data=shape(owned_slice.data[inside], param),
            grad=shape(owned_slice.grad[inside], param),
            master=shape(owned_slice.master[inside], param),
            has_copy=owned_slice.has_copy,
        )


# Where a rank is among those that have slices or copies of one parameter.


def cuts_of(param: Parameter, groups: ParallelGroups) -> list[tuple[int, int]]:
    """Return this rank's position along each axis that cuts the parameter, and the axis's size. Local."""
    axes: list[Axis] = []
    if is_marked(param, "stacked_experts"):
        axes.append(groups.ep)
    if is_marked(param, "tensor_model_parallel"):
        axes.append(groups_of(param, groups).tp)
    return [(axis.rank, axis.size) for axis in axes]


def model_replica(param: Parameter, entity: ParamEntity, groups: ParallelGroups) -> tuple[int, int]:
    """Return the replica id of a parameter's entity without its dp rank. Local.

    Raises:
        DeclarationError: it does not say which of its numbers is the dp rank.
    """
    is_one_rank = groups_of(param, groups).tp.size == 1 and groups.pp.size == 1
    if isinstance(entity.replica_id, int) and not is_one_rank:
        raise DeclarationError(
            f"{entity.key!r}: replica_id {entity.replica_id} is a single number, which does not say "
            f"whether it counts tp, pp or dp ranks. Give the tuple (pipeline copy, tp rank if not "
            f"sharded over tp, dp rank).",
            key=entity.key,
            rank=groups.rank,
        )
    return replica_of(entity)[:2]
