"""The gated MLP (SwiGLU), cut over tp.

The activation between the two projections. Gate and up are one fused projection of two named parts.

Source: Shazeer 2020, equation 6.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megackpt.parallel import ColumnParallelLinear, RowParallelLinear, ShardedModule
from models.stage import Stage


class GatedMLP(ShardedModule):
    """`down(silu(gate(x)) * up(x))` over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        config = stage.config
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            {"gate": config.ffn_size, "up": config.ffn_size},
            stage.groups,
            bias=config.linear_bias,
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            stage.groups,
            bias=config.linear_bias,
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        gate, up = self.linear_fc1.split(self.linear_fc1(x))  # each [s, b, ffn/tp]
        out: Tensor = self.linear_fc2(F.silu(gate) * up)
        return out
