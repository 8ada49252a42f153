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
    """`down(silu(gate(x)) * up(x))` over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp.

    Args:
        stage: what it is made with.
        ffn_size: extent between the two projections; None takes that of the config.
    """

    def __init__(self, stage: Stage, ffn_size: int | None = None) -> None:
        super().__init__(stage.groups)
        config = stage.config
        ffn_size = config.ffn_size if ffn_size is None else ffn_size
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            {"gate": ffn_size, "up": ffn_size},
            stage.groups,
            bias=config.linear_bias,
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )
        self.linear_fc2 = RowParallelLinear(
            ffn_size,
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
