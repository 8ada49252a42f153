"""Causal self-attention, heads cut over tp, sequences over cp: what all kinds have, and grouped queries.

The arithmetic between the projections.

Source: Ainslie et al. 2023 (grouped queries); Gemma 2, section 2 (soft caps); transformers `gpt_oss` (sinks).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

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
from models.blocks.norm import head_norm
from models.blocks.rotary import rotate, rotation
from models.stage import Stage


class CausalAttention(ShardedModule):
    """What all kinds of self-attention have: positions, and how heads attend. Collective over tp and cp.

    s is the number of tokens that this rank of cp has of each sequence; it attends to all of them, or to the
    last ones if the layer has a window.

    Args:
        stage: what its parts are made with.
        index: global index of the layer, which decides about the window and the positions.
    """

    tp_sharding = {"softmax_offset": 0}  # noqa: RUF012 - read-only by its type in ShardedModule
    softmax_offset: nn.Parameter | None

    def __init__(self, stage: Stage, index: int) -> None:
        super().__init__(stage.groups)
        config, choices = stage.config, stage.config.attention
        self.scale = config.head_dim**-0.5 if choices.scale is None else choices.scale
        self.softcap = choices.softcap
        self.window = config.window_of(index)
        self.rotary = config.rotary_of(index)
        # Each rank of tp has heads of its own, so each draws for itself.
        self.dropout = ParallelDropout(config.dropout, stage.rng, "distinct")

    def with_positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys `[b, n, s, dim]`, rotated if the layer has such positions."""
        if self.rotary is None:
            return q, k
        cp = self.groups.cp
        length = q.shape[2] * cp.size
        positions = context_positions(length, cp, device=q.device)
        turn = rotation(self.rotary, q.shape[-1], positions, length)
        return rotate(q, turn), rotate(k, turn)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return `[s, b, heads/tp * value_dim]` of queries, keys and values `[b, n, s, dim]`."""
        return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.dropout.is_active and self.softcap is None and self.softmax_offset is None:
            return causal_attention(q, k, v, self.groups.cp, window=self.window, scale=self.scale)
        parts = attention_parts(q, k, v, self.groups.cp, window=self.window)
        return torch.cat([self._attend_to(part) for part in parts], dim=2)

    def _attend_to(self, part: AttentionPart) -> Tensor:
        """Attention as it is written in papers, for what the fused kernels do not have.

        They have neither soft caps nor sinks, and draw from torch's global generator, which no checkpoint of
        ours restores.
        """
        q, shared = part.queries, part.queries.shape[1] // part.keys.shape[1]
        k, v = (x.repeat_interleave(shared, dim=1) for x in (part.keys, part.values))
        scores = (q @ k.transpose(-1, -2)).float() * self.scale  # [b, heads/tp, n, m]
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        weights = self._softmax(scores.masked_fill(~part.mask, -math.inf)).to(v.dtype)
        dropped: Tensor = self.dropout(weights)
        return dropped @ v

    def _softmax(self, scores: Tensor) -> Tensor:
        """Softmax over the keys; a sink is one more key, whose value is zero."""
        if self.softmax_offset is None:
            return scores.softmax(dim=-1)
        batch, count, queries, _ = scores.shape
        offsets = self.softmax_offset.float().view(1, count, 1, 1).expand(batch, count, queries, 1)
        return torch.cat([scores, offsets], dim=-1).softmax(dim=-1)[..., :-1]


class SelfAttention(CausalAttention):
    """Self-attention over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp and cp.

    Args:
        stage: what its parts are made with.
        index: global index of the layer, which decides about the window and the positions.
    """

    def __init__(self, stage: Stage, index: int = 0) -> None:
        super().__init__(stage, index)
        config, choices = stage.config, stage.config.attention
        self.head_dim = config.head_dim
        self.linear_qkv = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.query_groups,
            config.head_dim,
            stage.groups,
            bias=config.linear_bias if choices.qkv_bias is None else choices.qkv_bias,
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )
        self.q_layernorm = head_norm(stage) if choices.qk_norm else None
        self.k_layernorm = head_norm(stage) if choices.qk_norm else None
        self.softmax_offset = sinks(stage)
        self.linear_proj = output_projection(stage, config.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        q, k, v = (heads(part, self.head_dim) for part in self.linear_qkv.split(self.linear_qkv(x)))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = self.with_positions(q, k)
        out: Tensor = self.linear_proj(self.attend(q, k, v))
        return out


def heads(part: Tensor, dim: int) -> Tensor:
    """Return a projection `[s, b, n * dim]` as heads `[b, n, s, dim]`. Pure."""
    return part.view(*part.shape[:2], -1, dim).permute(1, 2, 0, 3)


def output_projection(stage: Stage, value_dim: int) -> RowParallelLinear:
    """Return the projection of what all heads make of their values, each of extent `value_dim`."""
    config, bias = stage.config, stage.config.attention.output_bias
    return RowParallelLinear(
        config.num_heads * value_dim,
        config.hidden_size,
        stage.groups,
        bias=config.linear_bias if bias is None else bias,
        sequence_parallel=stage.sequence_parallel,
        dtype=config.params_dtype,
        device=stage.device,
    )


def sinks(stage: Stage) -> nn.Parameter | None:
    """Return the scores of nothing of this rank's heads, `[heads/tp]`; None if there are none."""
    config = stage.config
    if not config.attention.sinks:
        return None
    heads = config.num_heads // stage.groups.tp.size  # the layout is checked: tp divides them
    return nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=stage.device))
