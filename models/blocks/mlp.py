"""The MLP, gated or plain, cut over tp: the activation between two projections.

Gate and up are one fused projection of two named components.

Source: Shazeer 2020, equation 6 (gated).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel import (
    ColumnParallelLinear,
    GatedExperts,
    MixtureOfExperts,
    PlainExperts,
    Router,
    RowParallelLinear,
    ShardedModule,
)
from megackpt.training.parallel.attributes import mark
from models.block_config import Activation, MoEConfig
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


# The mixture of experts of a transformer layer: routed experts, and shared ones that all tokens go to.
#
# The sizes and the shared experts; the rest is that of `megackpt.training.parallel.MixtureOfExperts`.
#
# Source: DeepSeek-V3, section 2.1.2; Megatron-Core `moe.shared_experts.SharedExpertMLP` (the gate).


class SharedExperts(GatedMLP):
    """A gated MLP, times a sigmoid of the token if there is a gate. Collective over tp; shapes as GatedMLP.

    The gate's weight `[1, hidden]` is equal on all ranks of tp.
    """

    def __init__(self, stage: Stage, ffn_size: int, *, gate: bool) -> None:
        super().__init__(stage, ffn_size)
        self.gate_weight: nn.Parameter | None = None
        if gate:
            shape, config = (1, stage.config.hidden_size), stage.config
            weight = torch.zeros(shape, dtype=config.params_dtype, device=stage.device)
            self.gate_weight = nn.Parameter(weight)
            if stage.sequence_parallel:
                mark(self.gate_weight, "sequence_parallel")

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, shaped like `x`."""
        out = super().forward(x)
        return out if self.gate_weight is None else out * F.linear(x, self.gate_weight).sigmoid()


class MoE(MixtureOfExperts):
    """A mixture of experts over `[s, b, hidden]` (`[s/tp, b, hidden]`).

    Collective over tp, cp, ep and etp.

    Raises:
        DeclarationError: the config has no experts.
    """

    def __init__(self, stage: Stage) -> None:
        config, moe = stage.config, _experts_of(stage)
        router = Router(
            config.hidden_size,
            moe.num_experts,
            stage.groups,
            moe.routing,
            bias=moe.router_bias,
            dtype=config.params_dtype,
            device=stage.device,
        )
        super().__init__(
            router,
            _build_experts(stage, moe),
            stage.groups,
            capacity=moe.capacity,
            shared_experts=_build_shared_experts(stage, moe) if moe.shared_ffn_hidden_size else None,
            sequence_parallel=stage.sequence_parallel,
        )


def _build_experts(stage: Stage, moe: MoEConfig) -> GatedExperts | PlainExperts:
    config = stage.config
    sizes = (moe.num_experts, config.hidden_size, moe.ffn_hidden_size, stage.groups)
    bias = config.linear_bias if moe.bias is None else moe.bias
    dtype, device = config.params_dtype, stage.device
    if moe.gated:
        return GatedExperts(*sizes, bias=bias, activation=moe.activation, dtype=dtype, device=device)
    activation = ACTIVATIONS[config.mlp.activation]
    return PlainExperts(*sizes, bias=bias, activation=activation, dtype=dtype, device=device)


def _build_shared_experts(stage: Stage, moe: MoEConfig) -> SharedExperts | MLP:
    if moe.gated:
        return SharedExperts(stage, moe.shared_ffn_hidden_size, gate=moe.shared_gate)
    return MLP(stage, moe.shared_ffn_hidden_size)


def _experts_of(stage: Stage) -> MoEConfig:
    if stage.config.moe is None:
        raise DeclarationError("GPTConfig.moe is None: there are no experts. Give a MoEConfig.")
    return stage.config.moe
