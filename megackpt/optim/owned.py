"""What one rank updates: pieces of buckets, and slots, the parts of parameters in them.

Owns these two views of the same memory, and cutting a buffer into them. Exchange works on pieces, the inner
optimizer and the checkpoint on slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from megackpt.optim.buffers import ParamGradBuffer
from megackpt.optim.ranges import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one bucket that this rank updates; tensors are 1-D and of the same length.

    Attributes:
        bucket: index of the bucket in its buffer.
        start: first element of the piece in the buffer.
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
class Slot:
    """The part of one parameter that this rank updates; never empty.

    Attributes:
        position: of the parameter among all of the optimizer's, groups in order.
        param: the model's parameter.
        owned: the range of the flattening of the parameter that this rank updates.
        data: that range of the parameter, a view.
        grad: that range of its gradient, a view.
        master: what the inner optimizer updates.
        has_copy: whether master is an fp32 copy and not data itself.
        scalars: names of the inner optimizer's states that are one number for the whole parameter.
        updates: 0-dim int64, updates so far, where the inner optimizer keeps no `step` of its own.
        lazy: whether the inner optimizer makes the state in the first step.
        fresh: whether the state is a placeholder; only where lazy.
        key: key of the parameter in the model's sharded state dict once that was seen; for errors only.
    """

    position: int
    param: Parameter
    owned: Span
    data: Tensor
    grad: Tensor
    master: Tensor
    has_copy: bool
    scalars: frozenset[str] = frozenset()
    updates: Tensor | None = None
    lazy: bool = False
    fresh: bool = False
    key: str = ""

    def __str__(self) -> str:
        name = repr(self.key) if self.key else f"parameter {self.position}"
        return f"{name} of shape {tuple(self.param.shape)}"


def cut_pieces(buffer: ParamGradBuffer, owned: Sequence[Span]) -> list[Piece]:
    """Return the pieces at the `owned` ranges of a buffer, one for each bucket. Local."""
    pieces = []
    for bucket, span in enumerate(owned):
        data, grad = buffer.data[span.as_slice()], buffer.grad[span.as_slice()]
        # Two-byte weights cannot take small updates: those are collected in an fp32 copy.
        master = data.float() if data.dtype.itemsize < 4 else data
        pieces.append(Piece(bucket=bucket, start=span.start, data=data, grad=grad, master=master))
    return pieces


def cut_slots(
    buffer: ParamGradBuffer,
    pieces: Sequence[Piece],
    owned: Sequence[Span],
    *,
    positions: Sequence[int],
    shape: Callable[[Tensor, Parameter], Tensor],
) -> Iterator[Slot]:
    """Yield the slots at the `owned` ranges of a buffer's parameters, which lie in `pieces`. Local.

    positions are those of the buffer's parameters in the optimizer; shape makes of a 1-D range the view
    that the inner optimizer is given.
    """
    for index, (param, span) in enumerate(zip(buffer.params, owned, strict=True)):
        if not span.numel:
            continue
        piece = pieces[buffer.layout.bucket_of_param[index]]
        start = buffer.layout.params[index].start + span.start - piece.start
        here = slice(start, start + span.numel)
        yield Slot(
            position=positions[index],
            param=param,
            owned=span,
            data=shape(piece.data[here], param),
            grad=shape(piece.grad[here], param),
            master=shape(piece.master[here], param),
            has_copy=piece.has_copy,
        )
