"""The MLP, gated or plain, cut over tp: the activation between two projections.

Gate and up are one fused projection of two named components.

Source: Shazeer 2020, equation 6 (gated).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from megackpt.training.parallel import ColumnParallelLinear, RowParallelLinear, ShardedModule
from models.block_config import Activation
from models.stage import Stage


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu_squared": _relu_squared,
}


class GatedMLP(ShardedModule):
    """`down(activation(gate(x)) * up(x))` over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp.

    Args:
        stage: what it is made with.
        ffn_size: extent between the two projections; None takes that of the config.
    """

    def __init__(self, stage: Stage, ffn_size: int | None = None) -> None:
        super().__init__(stage.groups)
        ffn_size = stage.config.ffn_size if ffn_size is None else ffn_size
        self.activation = ACTIVATIONS[stage.config.mlp.activation]
        self.linear_fc1 = _projection_in(stage, {"gate": ffn_size, "up": ffn_size})
        self.linear_fc2 = _projection_out(stage, ffn_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        gate, up = self.linear_fc1.split(self.linear_fc1(x))  # each [s, b, ffn/tp]
        out: Tensor = self.linear_fc2(self.activation(gate) * up)
        return out


class MLP(ShardedModule):
    """`down(activation(up(x)))` over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp.

    Args:
        stage: what it is made with.
        ffn_size: extent between the two projections; None takes that of the config.
    """

    def __init__(self, stage: Stage, ffn_size: int | None = None) -> None:
        super().__init__(stage.groups)
        ffn_size = stage.config.ffn_size if ffn_size is None else ffn_size
        self.activation = ACTIVATIONS[stage.config.mlp.activation]
        self.linear_fc1 = _projection_in(stage, ffn_size)
        self.linear_fc2 = _projection_out(stage, ffn_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        out: Tensor = self.linear_fc2(self.activation(self.linear_fc1(x)))
        return out


def build_mlp(stage: Stage) -> GatedMLP | MLP:
    """Return the MLP that the config describes."""
    return GatedMLP(stage) if stage.config.mlp.gated else MLP(stage)


def _projection_in(stage: Stage, out_features: int | Mapping[str, int]) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        stage.config.hidden_size,
        out_features,
        stage.groups,
        bias=_has_bias(stage),
        sequence_parallel=stage.sequence_parallel,
        dtype=stage.config.params_dtype,
        device=stage.device,
    )


def _projection_out(stage: Stage, in_features: int) -> RowParallelLinear:
    return RowParallelLinear(
        in_features,
        stage.config.hidden_size,
        stage.groups,
        bias=_has_bias(stage),
        sequence_parallel=stage.sequence_parallel,
        dtype=stage.config.params_dtype,
        device=stage.device,
    )


def _has_bias(stage: Stage) -> bool:
    bias = stage.config.mlp.bias
    return stage.config.linear_bias if bias is None else bias
