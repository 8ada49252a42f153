"""One transformer layer: attention and MLP, each behind a norm and added to what came in.

Owns the residual path and its dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megackpt.parallel import ParallelDropout, ParallelGroups, ParallelRng, RMSNorm, ShardedModule
from models.blocks.attention import SelfAttention
from models.blocks.mlp import GatedMLP
from models.config import GPTConfig


class TransformerLayer(ShardedModule):
    """A pre-norm layer over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp.

    Args:
        config: the model's sizes.
        groups: the ranks around this one.
        rng: random streams for dropout; may be None where config.dropout is 0.
        sequence_parallel: input and output are cut along the sequence.
        device: where the parameters lie.
    """

    def __init__(
        self,
        config: GPTConfig,
        groups: ParallelGroups,
        rng: ParallelRng | None,
        *,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        self.input_layernorm = block_norm(config, groups, sequence_parallel, device)
        self.self_attention = SelfAttention(
            config, groups, rng, sequence_parallel=sequence_parallel, device=device
        )
        self.pre_mlp_layernorm = block_norm(config, groups, sequence_parallel, device)
        self.mlp = GatedMLP(config, groups, sequence_parallel=sequence_parallel, device=device)
        self.dropout = residual_dropout(config, rng, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shaped like `x`."""
        x = x + self.dropout(self.self_attention(self.input_layernorm(x)))
        x = x + self.dropout(self.mlp(self.pre_mlp_layernorm(x)))
        return x


def residual_dropout(
    config: GPTConfig, rng: ParallelRng | None, *, sequence_parallel: bool
) -> ParallelDropout:
    """Return the dropout of the residual path.

    All of tp hold the same hidden states, so they must agree on what is dropped, unless each holds its own
    part of the sequence.
    """
    return ParallelDropout(config.dropout, rng, "distinct" if sequence_parallel else "replicated")


def block_norm(
    config: GPTConfig, groups: ParallelGroups, sequence_parallel: bool, device: torch.device | str | None
) -> RMSNorm:
    """Return the norm that stands before a block, and at the end of the model."""
    return RMSNorm(
        config.hidden_size,
        groups,
        eps=config.norm_eps,
        sequence_parallel=sequence_parallel,
        dtype=config.params_dtype,
        device=device,
    )
