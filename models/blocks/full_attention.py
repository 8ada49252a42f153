"""Attention to all tokens of a sequence: self-attention, cross attention, and positions as a bias of scores.

Which tokens see which, and where, is decided by what is added to the scores. With context parallelism each
rank has the queries of its share of the tokens, and gathers keys and values of whole sequences over cp.

Source: Vaswani et al. 2017, section 3.2.3 (cross attention); Raffel et al. 2020 (T5), section 2.1 (bias of
relative positions); names of Megatron-Core `CrossAttention`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megackpt.training.parallel
from megackpt.errors import DeclarationError
from megackpt.training.parallel import Axis, ShardedModule, context_positions
from megackpt.training.parallel.attention import join_heads, split_heads
from megackpt.training.parallel.context import gather_context, gather_keys_and_values
from models.blocks.attention import (
    Attention,
    has_input_bias,
    has_output_bias,
    input_projection,
    output_projection,
)
from models.encoder_config import DECODER_CHOICES
from models.stage import Stage


class _AttentionToAll(Attention):
    """How queries weigh the values of all tokens. Collective over cp."""

    def choose(self, stage: Stage) -> None:
        """Take over how queries weigh values.

        Raises:
            DeclarationError: the config's attention has a choice of decoders, such as output gates.
        """
        attention = stage.config.attention
        chosen = [choice for choice in DECODER_CHOICES if getattr(attention, choice)]
        if chosen:
            raise DeclarationError(
                f"{type(self).__name__} has no {', '.join(chosen)}: AttentionConfig has such choices for "
                f"decoders. Leave them at their defaults."
            )
        super().choose(stage)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Return `[s, b, heads/tp * dim]` of queries, keys and values `[b, n, s, dim]`."""
        k, v = gather_keys_and_values(k, v, self.groups.cp)
        if not self.has_fused_kernel:
            return join_heads(self.weigh(q, k, v, bias))
        return join_heads(
            F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale, enable_gqa=True)
        )


class FullAttention(_AttentionToAll):
    """Self-attention over `[s, b, hidden]` (`[s/tp, b, hidden]`) to all tokens. Collective over tp and cp.

    s is the number of tokens that this rank of cp has of each sequence.

    Args:
        stage: what its parts are made with.

    Raises:
        DeclarationError: the config's attention has a choice of decoders, such as output gates.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.head_dim = stage.config.head_dim
        self.linear_qkv = input_projection(stage)
        self.linear_proj = output_projection(stage)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the block's output, shaped like `x`.

        `bias` is added to the scores; it can be expanded to `[b, heads/tp, s, cp * s]`.
        """
        q, k, v = (split_heads(part, self.head_dim) for part in self.linear_qkv.split(self.linear_qkv(x)))
        out: Tensor = self.linear_proj(self.attend(q, k, v, bias))
        return out


class CrossAttention(_AttentionToAll, megackpt.training.parallel.CrossAttention):
    """Attention of tokens `[s, b, hidden]` to all of a memory `[m, b, hidden]`. Collective over tp and cp.

    The projections are those of `megackpt.training.parallel.CrossAttention`.

    Args:
        stage: what its parts are made with.

    Raises:
        DeclarationError: as for `FullAttention`.
    """

    def __init__(self, stage: Stage) -> None:
        config = stage.config
        megackpt.training.parallel.CrossAttention.__init__(
            self,
            config.hidden_size,
            config.num_heads,
            config.head_dim,
            stage.groups,
            bias=has_input_bias(stage),
            output_bias=has_output_bias(stage),
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )
        self.choose(stage)


class RelativePositions(ShardedModule):
    """A number for each head and each bucket of distances, weight `[buckets, heads/tp]`. Local.

    Args:
        stage: what it is made with.
        buckets: number of buckets.
    """

    tp_sharding = {"weight": 1}  # noqa: RUF012 - read-only by its type in ShardedModule

    def __init__(self, stage: Stage, buckets: int) -> None:
        super().__init__(stage.groups)
        config = stage.config
        own_heads = config.num_heads // stage.groups.tp.size  # the layout is checked: tp divides them
        weight = torch.empty(buckets, own_heads, dtype=config.params_dtype, device=stage.device)
        self.weight = nn.Parameter(weight.normal_(std=config.init_std))


def relative_bias(table: Tensor, length: int, cp: Axis, *, max_distance: int, causal: bool) -> Tensor:
    """Return what is added to the scores of a sequence with itself, `[1, heads/tp, s/cp, s]`. Local.

    Args:
        table: numbers for each bucket and head, `[buckets, heads/tp]`.
        length: tokens of the whole sequence, s.
        cp: the ranks that have shares of the queries.
        max_distance: all larger distances have the last bucket.
        causal: tokens do not see those after them, and buckets are of distances backwards only.
    """
    queries = context_positions(length, cp, device=table.device)
    keys = torch.arange(length, device=table.device)
    distances = keys - queries.unsqueeze(1)  # [queries, keys]; positive if the key comes later
    buckets = _buckets(distances, len(table), max_distance=max_distance, causal=causal)
    bias = F.embedding(buckets, table).permute(2, 0, 1)
    return (bias.masked_fill(distances > 0, -math.inf) if causal else bias).unsqueeze(0)


def padding_bias(tokens: Tensor, pad_token_id: int | None, cp: Axis, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to the scores so that no token attends to padding, `[b, 1, 1, s]`.

    Collective over cp.

    Args:
        tokens: this rank's share of the keys' token ids, `[b, s/cp]`.
        pad_token_id: the id of padding; None if there is none, and nothing to be added.
        cp: the ranks that have the other shares.
        dtype: that of the hidden states.
    """
    if pad_token_id is None:
        return None
    # The least number, and not -inf: softmax of a sequence that is all padding would be NaN.
    numbers = torch.zeros(tokens.shape, dtype=dtype, device=tokens.device)
    numbers.masked_fill_(tokens == pad_token_id, torch.finfo(dtype).min)
    return gather_context(numbers, cp, dim=1)[:, None, None]


def _buckets(distances: Tensor, count: int, *, max_distance: int, causal: bool) -> Tensor:
    """Return the bucket of each distance, in float32 and in the order of operations of transformers.

    Half of the buckets have one distance each; the others grow with the logarithm. Unless it is causal,
    keys that come later have the second half of all buckets.
    """
    if not causal:
        of_sign = _buckets(-distances.abs(), count // 2, max_distance=max_distance, causal=True)
        return of_sign + (distances > 0) * (count // 2)
    back, exact = (-distances).clamp(min=0), count // 2
    growth = torch.log(back.float() / exact) / math.log(max_distance / exact) * (count - exact)
    # The logarithm of 0 is not looked at.
    far = exact + growth.clamp(min=0).long()
    return torch.where(back < exact, back, far.clamp(max=count - 1))
