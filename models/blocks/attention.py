"""Causal self-attention with rotary positions and grouped queries, heads cut over tp.

The arithmetic between the two projections.

Source: Su et al. 2021, section 3.4.2 (rotary positions, halves rotated as in GPT-NeoX); Ainslie et al. 2023
(grouped queries).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.parallel import (
    ParallelDropout,
    QKVParallelLinear,
    RowParallelLinear,
    ShardedModule,
)
from models.stage import Stage


class SelfAttention(ShardedModule):
    """Self-attention over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp."""

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
        q, k = rotate(q, self.rope_base), rotate(k, self.rope_base)
        context = self._attend(q, k, v)  # [b, heads/tp, s, head_dim]
        merged = context.permute(2, 0, 1, 3).flatten(2)  # [s, b, hidden/tp]
        out: Tensor = self.linear_proj(merged)
        return out

    def _heads(self, part: Tensor) -> Tensor:
        """`[s, b, n * head_dim]` to `[b, n, s, head_dim]`."""
        return part.view(*part.shape[:2], -1, self.head_dim).permute(1, 2, 0, 3)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.dropout.is_active:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        # The fused kernels draw from torch's global generator, which no checkpoint of ours restores.
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(self.head_dim)  # [b, heads/tp, s, s]
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1).to(v.dtype)
        dropped: Tensor = self.dropout(weights)
        return dropped @ v


def rotate(x: Tensor, base: float) -> Tensor:
    """Return queries or keys `[b, n, s, head_dim]` with rotary positions 0 to s - 1 applied. Local, pure."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    position = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)
    angle = torch.outer(position, frequency)  # [s, head_dim/2]
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
