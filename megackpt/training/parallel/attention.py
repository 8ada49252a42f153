"""Attention that is more than one projection: latent attention, and attention of a decoder to an encoder.

Heads are cut over tp. Sequences may be cut over cp: each rank has the queries of its tokens, and gathers keys
and values. Subclasses change what happens between the projections, such as positions or dropout.

Source: DeepSeek-V2, section 2.1, and Megatron-Core `multi_latent_attention.MLASelfAttention` (names); Vaswani
et al. 2017, section 3.2.3, and Megatron-Core `CrossAttention` (names).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.training.parallel.collectives import copy_to, gather_sequence
from megackpt.training.parallel.context import causal_attention, gather_keys_and_values
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megackpt.training.parallel.mixin import ShardedModule
from megackpt.training.parallel.norm import RMSNorm


def split_heads(part: Tensor, dim: int) -> Tensor:
    """Return a projection `[s, b, n * dim]` as heads `[b, n, s, dim]`. Pure."""
    return part.view(*part.shape[:2], -1, dim).permute(1, 2, 0, 3)


def join_heads(attended: Tensor) -> Tensor:
    """Return heads `[b, n, s, dim]` side by side, `[s, b, n * dim]`. Pure."""
    return attended.permute(2, 0, 1, 3).flatten(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Latent attention: keys and values, and perhaps queries, are made of few features of each token.

    Attributes:
        kv_lora_rank: features that keys and values are made of.
        q_lora_rank: features that queries are made of; None makes them of the hidden state.
        qk_head_dim: extent of the part of a query or key head that does not see positions.
        qk_pos_emb_head_dim: extent of its rotated part, which the keys of all heads share.
        v_head_dim: extent of a value head.
        norm_eps: added to the mean square in the norms of the features.

    Raises:
        DeclarationError: a size below 1.

    Source: names as in Megatron-Core `MLATransformerConfig`.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise DeclarationError(f"LatentSizes.{name} is {size}. It must be at least 1.")

    @property
    def head_dim(self) -> int:
        """Extent of a query or key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


class LatentAttention(ShardedModule):
    """Causal latent attention over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp and cp.

    s is the number of tokens that this rank of cp has of each sequence. The projections to few features and
    their norms are whole on all ranks of tp; those from the features to heads are cut over tp by heads. Keys
    of all heads have the same rotated part. A subclass gives positions (`with_positions`), and may change how
    queries weigh values (`attend`).

    Args:
        hidden_size: extent of a hidden state.
        num_heads: heads of all ranks; tp divides them.
        sizes: of features and heads.
        groups: the ranks around this one.
        bias: whether the projections to features have a bias.
        output_bias: whether the projection of the output has one.
        scale: what scores are multiplied by; None for `1 / sqrt(sizes.head_dim)`.
        sequence_parallel: hidden states are cut along the sequence.
        dtype: dtype of the parameters.
        device: where they are.

    Raises:
        DeclarationError: tp does not divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: LatentSizes,
        groups: ParallelGroups,
        *,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        self.sizes, self.sequence_parallel = sizes, sequence_parallel
        self.scale = sizes.head_dim**-0.5 if scale is None else scale
        made: dict[str, Any] = {"sequence_parallel": sequence_parallel, "dtype": dtype, "device": device}
        to_features, to_heads = {"bias": bias, **made}, {"bias": False, **made}
        norm = {"eps": sizes.norm_eps, **made}
        q_rank, kv_rank, queries = sizes.q_lora_rank, sizes.kv_lora_rank, num_heads * sizes.head_dim
        if q_rank is None:
            self.linear_q_proj = ColumnParallelLinear(hidden_size, queries, groups, **to_heads)
        else:
            self.linear_q_down_proj = ReplicatedLinear(hidden_size, q_rank, groups, **to_features)
            self.q_layernorm = RMSNorm(q_rank, groups, **norm)
            self.linear_q_up_proj = ColumnParallelLinear(q_rank, queries, groups, **to_heads)
        features = kv_rank + sizes.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(hidden_size, features, groups, **to_features)
        self.kv_layernorm = RMSNorm(kv_rank, groups, **norm)
        keys_and_values = num_heads * (sizes.qk_head_dim + sizes.v_head_dim)
        self.linear_kv_up_proj = ColumnParallelLinear(kv_rank, keys_and_values, groups, **to_heads)
        values = num_heads * sizes.v_head_dim
        self.linear_proj = RowParallelLinear(values, hidden_size, groups, bias=output_bias, **made)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        sizes = self.sizes
        features, k_rotary = _split(
            self.linear_kv_down_proj(x), sizes.kv_lora_rank, sizes.qk_pos_emb_head_dim
        )
        # Heads of all ranks of tp use the rotated part, so its gradients are added over tp.
        tp = self.groups.tp
        k_rotary = gather_sequence(k_rotary, tp) if self.sequence_parallel else copy_to(k_rotary, tp)
        k_rotary = split_heads(k_rotary, sizes.qk_pos_emb_head_dim)  # [b, 1, s, dim]

        kv = self.linear_kv_up_proj(self.kv_layernorm(features))
        k_plain, v = _split(
            split_heads(kv, sizes.qk_head_dim + sizes.v_head_dim), sizes.qk_head_dim, sizes.v_head_dim
        )
        q = split_heads(self._queries(x), sizes.head_dim)
        q_plain, q_rotary = _split(q, sizes.qk_head_dim, sizes.qk_pos_emb_head_dim)

        q_rotary, k_rotary = self.with_positions(q_rotary, k_rotary)
        k_rotary = k_rotary.expand(-1, k_plain.shape[1], -1, -1)
        q, k = torch.cat([q_plain, q_rotary], dim=-1), torch.cat([k_plain, k_rotary], dim=-1)
        out: Tensor = self.linear_proj(self.attend(q, k, v))
        return out

    def with_positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of queries `[b, n, s, dim]` and keys `[b, 1, s, dim]` that see positions, rotated.

        Here they are returned as they are.
        """
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return `[s, b, heads/tp * value_dim]` of queries, keys and values `[b, heads/tp, s, dim]`."""
        return join_heads(causal_attention(q, k, v, self.groups.cp, scale=self.scale))

    def _queries(self, x: Tensor) -> Tensor:
        """Return the queries of this rank's heads, `[s, b, heads/tp * head_dim]`."""
        if self.sizes.q_lora_rank is None:
            queries: Tensor = self.linear_q_proj(x)
        else:
            queries = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x)))
        return queries


class CrossAttention(ShardedModule):
    """Attention of tokens `[s, b, hidden]` to all of a memory `[m, b, hidden]`. Collective over tp and cp.

    Each query head has a key head of its own. With sequence parallelism each rank of tp has its part of both,
    `[s/tp, b, hidden]` and `[m/tp, b, hidden]`. s and m count what this rank of cp has of each sequence. A
    subclass may change how queries weigh values (`attend`).

    Args:
        hidden_size: extent of a hidden state of either sequence.
        num_heads: heads of all ranks; tp divides them.
        head_dim: extent of one head.
        groups: the ranks around this one.
        bias: whether the projections to heads have a bias.
        output_bias: whether the projection of the output has one.
        scale: what scores are multiplied by; None for `1 / sqrt(head_dim)`.
        sequence_parallel: hidden states are cut along the sequence.
        dtype: dtype of the parameters.
        device: where they are.

    Raises:
        DeclarationError: tp does not divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        groups: ParallelGroups,
        *,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        made: dict[str, Any] = {"sequence_parallel": sequence_parallel, "dtype": dtype, "device": device}
        features = num_heads * head_dim
        of_memory: Mapping[str, int] = {"k": features, "v": features}
        self.linear_q = ColumnParallelLinear(hidden_size, features, groups, bias=bias, **made)
        self.linear_kv = ColumnParallelLinear(hidden_size, of_memory, groups, bias=bias, **made)
        self.linear_proj = RowParallelLinear(features, hidden_size, groups, bias=output_bias, **made)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the block's output, shaped like `x`.

        `bias` is added to the scores; it can be expanded to `[b, heads/tp, s, cp * m]`.
        """
        q = split_heads(self.linear_q(x), self.head_dim)
        k, v = (split_heads(part, self.head_dim) for part in self.linear_kv.split(self.linear_kv(memory)))
        out: Tensor = self.linear_proj(self.attend(q, k, v, bias))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Return `[s, b, heads/tp * head_dim]` of queries, keys and values `[b, heads/tp, n, head_dim]`."""
        k, v = gather_keys_and_values(k, v, self.groups.cp)
        return join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale))


def _split(x: Tensor, first: int, second: int) -> tuple[Tensor, ...]:
    return torch.split_with_sizes(x, [first, second], dim=-1)
