"""Causal self-attention with rotary positions and grouped queries, heads cut over tp, sequences over cp.

The arithmetic between the two projections.

Source: Su et al. 2021, section 3.4.2 (rotary positions, halves rotated as in GPT-NeoX); Ainslie et al. 2023
(grouped queries).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megackpt.parallel import (
    AttentionPart,
    ParallelDropout,
    QKVParallelLinear,
    RowParallelLinear,
    ShardedModule,
    attention_parts,
    causal_attention,
    context_positions,
)
from models.stage import Stage


class SelfAttention(ShardedModule):
    """Self-attention over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp and cp.

    s is the number of tokens that this rank of cp has of each sequence; it attends to all of them.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        config = stage.config
        self.head_dim = config.head_dim
        self.rope_base = config.rope_base
        self.linear_qkv = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.query_groups,
            config.head_dim,
            stage.groups,
            bias=config.linear_bias,
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )
        self.linear_proj = RowParallelLinear(
            config.hidden_size,
            config.hidden_size,
            stage.groups,
            bias=config.linear_bias,
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )
        # Each rank of tp has heads of its own, so each draws for itself.
        self.dropout = ParallelDropout(config.dropout, stage.rng, "distinct")

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        q, k, v = (self._heads(part) for part in self.linear_qkv.split(self.linear_qkv(x)))
        cp = self.groups.cp
        positions = context_positions(q.shape[2] * cp.size, cp, device=q.device)
        q, k = rotate(q, self.rope_base, positions), rotate(k, self.rope_base, positions)
        context = self._attend(q, k, v)  # [b, heads/tp, s, head_dim]
        merged = context.permute(2, 0, 1, 3).flatten(2)  # [s, b, hidden/tp]
        out: Tensor = self.linear_proj(merged)
        return out

    def _heads(self, part: Tensor) -> Tensor:
        """`[s, b, n * head_dim]` to `[b, n, s, head_dim]`."""
        return part.view(*part.shape[:2], -1, self.head_dim).permute(1, 2, 0, 3)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.dropout.is_active:
            return causal_attention(q, k, v, self.groups.cp)
        parts = attention_parts(q, k, v, self.groups.cp)
        return torch.cat([self._attend_with_dropout(part) for part in parts], dim=2)

    def _attend_with_dropout(self, part: AttentionPart) -> Tensor:
        """The fused kernels draw from torch's global generator, which no checkpoint of ours restores."""
        q, shared = part.queries, part.queries.shape[1] // part.keys.shape[1]
        k, v = (x.repeat_interleave(shared, dim=1) for x in (part.keys, part.values))
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(self.head_dim)  # [b, heads/tp, n, m]
        weights = scores.masked_fill(~part.mask, float("-inf")).softmax(dim=-1).to(v.dtype)
        dropped: Tensor = self.dropout(weights)
        return dropped @ v


def rotate(x: Tensor, base: float, positions: Tensor) -> Tensor:
    """Return queries or keys `[b, n, s, head_dim]` with rotary embeddings of `positions` `[s]`. Pure."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = torch.outer(positions.float(), frequency)  # [s, head_dim/2]
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
