"""Attributes of parameters, which layers set and optimizers read.

They decide which gradients are summed over which axis, and which parameters count in the global norm.

    attribute               meaning where it is True
    tensor_model_parallel   this rank has a slice over tp; otherwise all of tp have the same values, and the
                            parameter counts once in the norm
    sequence_parallel       used on this rank's part of the sequence only: gradients are to be summed over tp
    shared_embedding        the tied embedding on the first and last stage: gradients are to be summed over
                            `groups.embedding`
    is_duplicate            the last stage's copy of the tied embedding: not counted in the norm
    expert_parallel         a parameter of experts: its slice is that of `etp`, not of `tp`, and its replicas
                            are the ranks of `groups.edp`
    stacked_experts         a parameter of several experts, of which ep cuts a dim: one parameter on all ranks
                            of `groups.ep`, which are updated together

For a parameter of experts, tp is etp in all of these. `sequence_parallel` then says that each etp rank has a
part of the gradient: for a bias that a rank adds to its own tokens, after the sums over etp were cut again
into the tokens of each rank, or that only one of them adds to its partial sums. A bias that every etp rank
adds to all tokens of the group has the whole gradient on each, and is not marked.

A parameter that tp cuts may have rows that are the same on several ranks: key and value heads, where tp has
more ranks than there are heads. `copied_rows` are the `RowRange`s that are a copy on this rank; they do not
count in the norm.

Source: the first two and `shared_embedding` carry Megatron-Core's names and meaning. What Megatron-Core calls
`allreduce = False` is `expert_parallel` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowRange:
    """Elements `[start, stop)` along a dim of a tensor."""

    dim: int
    start: int
    stop: int


ParameterFlag = Literal[
    "tensor_model_parallel",
    "sequence_parallel",
    "shared_embedding",
    "is_duplicate",
    "expert_parallel",
    "stacked_experts",
]


def mark(param: Tensor, *flags: ParameterFlag) -> None:
    """Set each of `flags` on `param` to True. Local."""
    for flag in flags:
        setattr(param, flag, True)


def is_marked(param: Tensor, flag: ParameterFlag) -> bool:
    """Return whether `flag` is set on `param`. Local."""
    return bool(getattr(param, flag, False))


def mark_copied_rows(param: Tensor, ranges: Sequence[RowRange]) -> None:
    """Mark the rows of `param` that are a copy of those of another tp rank. Local."""
    param.copied_rows = tuple(ranges)  # type: ignore[attr-defined]


def copied_rows(param: Tensor) -> tuple[RowRange, ...]:
    """Return the rows of `param` that are a copy on this rank; none for most parameters. Local."""
    rows: tuple[RowRange, ...] = getattr(param, "copied_rows", ())
    return rows
