"""One transformer layer: attention and MLP or experts, each behind a norm and added to what came in.

The residual path and its dropout.
"""

from __future__ import annotations

from torch import Tensor

from megackpt.parallel import ParallelDropout, RMSNorm, ShardedModule
from models.blocks.attention import SelfAttention
from models.blocks.mlp import GatedMLP
from models.blocks.moe import MoE
from models.stage import Stage


class TransformerLayer(ShardedModule):
    """A pre-norm layer over `[s, b, hidden]` (`[s/tp, b, hidden]`). As collective as its blocks.

    Args:
        stage: what its parts are made with.
        index: global index of the layer, which decides whether it has an MLP or a mixture of experts.
    """

    def __init__(self, stage: Stage, index: int) -> None:
        super().__init__(stage.groups)
        self.input_layernorm = block_norm(stage)
        self.self_attention = SelfAttention(stage)
        self.pre_mlp_layernorm = block_norm(stage)
        self.mlp = MoE(stage) if stage.config.moe_layers[index] else GatedMLP(stage)
        self.dropout = residual_dropout(stage)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shaped like `x`."""
        x = x + self.dropout(self.self_attention(self.input_layernorm(x)))
        x = x + self.dropout(self.mlp(self.pre_mlp_layernorm(x)))
        return x


def residual_dropout(stage: Stage) -> ParallelDropout:
    """Return the dropout of the residual path.

    All of tp hold the same hidden states, so they must agree on what is dropped, unless each holds its own
    part of the sequence.
    """
    return ParallelDropout(
        stage.config.dropout, stage.rng, "distinct" if stage.sequence_parallel else "replicated"
    )


def block_norm(stage: Stage) -> RMSNorm:
    """Return the norm that stands before a block, and at the end of the model."""
    return RMSNorm(
        stage.config.hidden_size,
        stage.groups,
        eps=stage.config.norm_eps,
        sequence_parallel=stage.sequence_parallel,
        dtype=stage.config.params_dtype,
        device=stage.device,
    )
