"""RMSNorm and LayerNorm over the hidden dim; their parameters are equal on all ranks of tp.

With sequence parallelism each rank normalises its part of the sequence only, so the gradients of the
parameters are partial sums. The parameters are marked `sequence_parallel`, and the optimizer sums their
gradients over tp.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.training.parallel.attributes import mark
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.mixin import ShardedModule


class RMSNorm(ShardedModule):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim; weight `[hidden]`. Local.

    Args:
        hidden_size: extent of the last dim.
        groups: the ranks around this one.
        eps: added to the mean square.
        zero_centred: multiply by `1 + weight`; the weight starts at 0.
        sequence_parallel: the input is this rank's part of the sequence.
        dtype: dtype of the weight; the statistics are computed in float32.
        device: where the weight is.

    Source: Zhang and Sennrich 2019, equation 4; `zero_centred` is Megatron-Core's
    `layernorm_zero_centered_gamma`.
    """

    def __init__(
        self,
        hidden_size: int,
        groups: ParallelGroups,
        *,
        eps: float = 1e-5,
        zero_centred: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        self.eps = eps
        self.zero_centred = zero_centred
        start = 0.0 if zero_centred else 1.0
        self.weight = nn.Parameter(torch.full((hidden_size,), start, dtype=dtype, device=device))
        if sequence_parallel:
            mark(self.weight, "sequence_parallel")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[..., hidden]`; shape and dtype do not change."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        weight = 1.0 + self.weight.float() if self.zero_centred else self.weight.float()
        return (wide * weight).to(x.dtype)


class LayerNorm(ShardedModule):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dim; weight and bias `[hidden]`. Local.

    Args:
        hidden_size: extent of the last dim.
        groups: the ranks around this one.
        eps: added to the variance.
        sequence_parallel: the input is this rank's part of the sequence.
        dtype: dtype of the parameters.
        device: where the parameters are.
    """

    def __init__(
        self,
        hidden_size: int,
        groups: ParallelGroups,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))
        if sequence_parallel:
            mark(self.weight, "sequence_parallel")
            mark(self.bias, "sequence_parallel")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[..., hidden]`; shape and dtype do not change."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
