"""One transformer layer: attention and MLP or experts, each behind a norm and added to what came in.

The residual path, its dropout and the norms on it.
"""

from __future__ import annotations

from torch import Tensor

from megackpt.parallel import ParallelDropout, ShardedModule
from models.blocks.attention import SelfAttention
from models.blocks.latent_attention import LatentAttention
from models.blocks.mlp import build_mlp
from models.blocks.moe import MoE
from models.blocks.norm import block_norm
from models.stage import Stage


class TransformerLayer(ShardedModule):
    """A pre-norm layer over `[s, b, hidden]` (`[s/tp, b, hidden]`). As collective as its blocks.

    Args:
        stage: what its parts are made with.
        index: global index of the layer, which decides whether it has an MLP or a mixture of experts, and
            what its attention sees.
    """

    def __init__(self, stage: Stage, index: int) -> None:
        super().__init__(stage.groups)
        after_blocks = stage.config.norm.after_blocks
        self.input_layernorm = block_norm(stage)
        latent = stage.config.attention.latent is not None
        self.self_attention = LatentAttention(stage, index) if latent else SelfAttention(stage, index)
        self.post_self_attn_layernorm = block_norm(stage) if after_blocks else None
        self.pre_mlp_layernorm = block_norm(stage)
        self.mlp = MoE(stage) if stage.config.moe_layers[index] else build_mlp(stage)
        self.post_mlp_layernorm = block_norm(stage) if after_blocks else None
        self.dropout = residual_dropout(stage)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shaped like `x`."""
        attended = self.self_attention(self.input_layernorm(x))
        if self.post_self_attn_layernorm is not None:
            attended = self.post_self_attn_layernorm(attended)
        x = x + self.dropout(attended)
        out = self.mlp(self.pre_mlp_layernorm(x))
        if self.post_mlp_layernorm is not None:
            out = self.post_mlp_layernorm(out)
        x = x + self.dropout(out)
        return x


def residual_dropout(stage: Stage) -> ParallelDropout:
    """Return the dropout of the residual path.

    All of tp hold the same hidden states, so they must agree on what is dropped, unless each holds its own
    part of the sequence.
    """
    return ParallelDropout(
        stage.config.dropout, stage.rng, "distinct" if stage.sequence_parallel else "replicated"
    )
