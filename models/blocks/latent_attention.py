"""Latent attention: keys and values, and perhaps queries, are made of few features of each token.

Where the features are normalised and which parts of heads see positions.

Source: DeepSeek-V2, section 2.1; Megatron-Core `multi_latent_attention.MLASelfAttention` (names).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.parallel import ColumnParallelLinear, ReplicatedLinear, RMSNorm, copy_to, gather_sequence
from models.block_config import LatentConfig
from models.blocks.attention import CausalAttention, heads, output_projection, sinks
from models.stage import Stage


class LatentAttention(CausalAttention):
    """Latent attention over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp and cp.

    The projections to few features and their norms are whole on all ranks of tp; those from the features to
    heads are cut over tp by heads. Keys of all heads have the same rotated part.

    Args:
        stage: what its parts are made with.
        index: global index of the layer, which decides about the window and the positions.

    Raises:
        DeclarationError: the config has no latent attention.
    """

    def __init__(self, stage: Stage, index: int = 0) -> None:
        super().__init__(stage, index)
        self.sizes = sizes = _sizes_of(stage)
        self.sequence_parallel = stage.sequence_parallel
        queries = stage.config.num_heads * stage.config.head_dim
        if sizes.q_lora_rank is None:
            self.linear_q_proj = _to_heads(stage, stage.config.hidden_size, queries)
        else:
            self.linear_q_down_proj = _to_features(stage, sizes.q_lora_rank)
            self.q_layernorm = _norm(stage, sizes.q_lora_rank)
            self.linear_q_up_proj = _to_heads(stage, sizes.q_lora_rank, queries)
        self.linear_kv_down_proj = _to_features(stage, sizes.kv_lora_rank + sizes.qk_pos_emb_head_dim)
        self.kv_layernorm = _norm(stage, sizes.kv_lora_rank)
        keys_and_values = stage.config.num_heads * (sizes.qk_head_dim + sizes.v_head_dim)
        self.linear_kv_up_proj = _to_heads(stage, sizes.kv_lora_rank, keys_and_values)
        self.softmax_offset = sinks(stage)
        self.linear_proj = output_projection(stage, sizes.v_head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        sizes = self.sizes
        features, k_rotary = _split(
            self.linear_kv_down_proj(x), sizes.kv_lora_rank, sizes.qk_pos_emb_head_dim
        )
        # Heads of all ranks of tp use the rotated part, so its gradients are added over tp.
        tp = self.groups.tp
        k_rotary = gather_sequence(k_rotary, tp) if self.sequence_parallel else copy_to(k_rotary, tp)
        k_rotary = heads(k_rotary, sizes.qk_pos_emb_head_dim)  # [b, 1, s, dim]

        kv = heads(self.linear_kv_up_proj(self.kv_layernorm(features)), sizes.qk_head_dim + sizes.v_head_dim)
        k_plain, v = _split(kv, sizes.qk_head_dim, sizes.v_head_dim)
        q = heads(self._queries(x), sizes.qk_head_dim + sizes.qk_pos_emb_head_dim)
        q_plain, q_rotary = _split(q, sizes.qk_head_dim, sizes.qk_pos_emb_head_dim)

        q_rotary, k_rotary = self.with_positions(q_rotary, k_rotary)
        k_rotary = k_rotary.expand(-1, k_plain.shape[1], -1, -1)
        q, k = torch.cat([q_plain, q_rotary], dim=-1), torch.cat([k_plain, k_rotary], dim=-1)
        out: Tensor = self.linear_proj(self.attend(q, k, v))
        return out

    def _queries(self, x: Tensor) -> Tensor:
        """Return the queries of this rank's heads, `[s, b, heads/tp * head_dim]`."""
        if self.sizes.q_lora_rank is None:
            queries: Tensor = self.linear_q_proj(x)
        else:
            queries = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x)))
        return queries


def _sizes_of(stage: Stage) -> LatentConfig:
    sizes = stage.config.attention.latent
    if sizes is None:
        raise DeclarationError("GPTConfig.attention.latent is None: give a LatentConfig.")
    return sizes


def _split(x: Tensor, first: int, second: int) -> tuple[Tensor, ...]:
    return torch.split_with_sizes(x, [first, second], dim=-1)


def _to_features(stage: Stage, out_features: int) -> ReplicatedLinear:
    config, bias = stage.config, stage.config.attention.qkv_bias
    return ReplicatedLinear(
        config.hidden_size,
        out_features,
        stage.groups,
        bias=config.linear_bias if bias is None else bias,
        sequence_parallel=stage.sequence_parallel,
        dtype=config.params_dtype,
        device=stage.device,
    )


def _to_heads(stage: Stage, in_features: int, out_features: int) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        in_features,
        out_features,
        stage.groups,
        bias=False,
        sequence_parallel=stage.sequence_parallel,
        dtype=stage.config.params_dtype,
        device=stage.device,
    )


def _norm(stage: Stage, size: int) -> RMSNorm:
    return RMSNorm(
        size,
        stage.groups,
        eps=_sizes_of(stage).norm_eps,
        sequence_parallel=stage.sequence_parallel,
        dtype=stage.config.params_dtype,
        device=stage.device,
    )
