"""What a layer tells the optimizer about a parameter, as attributes of the parameter.

Owns the names. Layers set them; an optimizer reads them to know which gradients are summed over which axis
and which parameters count in the global norm.

    attribute               meaning where it is True
    tensor_model_parallel   this rank holds a slice over tp; otherwise all of tp hold the same values, and the
                            parameter counts once in the norm
    sequence_parallel       used on this rank's part of the sequence only: gradients are to be summed over tp
    shared_embedding        the tied embedding on the first and last stage: gradients are to be summed over
                            `groups.embedding`
    is_duplicate            the last stage's copy of the tied embedding: not counted in the norm

A parameter that tp cuts may have rows of which several ranks hold the same: key and value heads where tp has
more ranks than there are heads. `copied_rows` has the `RowRange`s that this rank holds as a copy; they do not
count in the norm.

Source: the first two and `shared_embedding` carry Megatron-Core's names and meaning.
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


ParameterFlag = Literal["tensor_model_parallel", "sequence_parallel", "shared_embedding", "is_duplicate"]


def mark(param: Tensor, *flags: ParameterFlag) -> None:
    """Set each of `flags` on `param` to True. Local."""
    for flag in flags:
        setattr(param, flag, True)


def is_marked(param: Tensor, flag: ParameterFlag) -> bool:
    """Say whether `flag` is set on `param`. Local."""
    return bool(getattr(param, flag, False))


def mark_copied_rows(param: Tensor, ranges: Sequence[RowRange]) -> None:
    """Note the rows of `param` that this rank holds as a copy of another tp rank's. Local."""
    param.copied_rows = tuple(ranges)  # type: ignore[attr-defined]


def copied_rows(param: Tensor) -> tuple[RowRange, ...]:
    """Return the rows of `param` that this rank holds as a copy; none for most parameters. Local."""
    found: tuple[RowRange, ...] = getattr(param, "copied_rows", ())
    return found
