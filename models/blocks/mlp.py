"""The gated MLP (SwiGLU), cut over tp.

Owns the activation between the two projections. Gate and up are one fused projection of two named parts.

Source: Shazeer 2020, equation 6.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.parallel import ColumnParallelLinear, ParallelGroups, RowParallelLinear, ShardedModule
from models.config import GPTConfig


class GatedMLP(ShardedModule):
    """`down(silu(gate(x)) * up(x))` over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp.

    Args:
        config: the model's sizes.
        groups: the ranks around this one.
        sequence_parallel: input and output are cut along the sequence.
        device: where the parameters lie.
    """

    def __init__(
        self,
        config: GPTConfig,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            {"gate": config.ffn_size, "up": config.ffn_size},
            groups,
            bias=config.linear_bias,
            sequence_parallel=sequence_parallel,
            dtype=config.params_dtype,
            device=device,
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            groups,
            bias=config.linear_bias,
            sequence_parallel=sequence_parallel,
            dtype=config.params_dtype,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        gate, up = self.linear_fc1.split(self.linear_fc1(x))  # each [s, b, ffn/tp]
        out: Tensor = self.linear_fc2(F.silu(gate) * up)
        return out
