"""Context parallelism: each rank of cp has a share of every sequence, and all have the same weights.

A sequence is cut into `2 * cp` parts of equal length. Rank `i` has parts `i` and `2 * cp - 1 - i`, one after
the other, as the `i`-th of the first half and the `i`-th last of the second. A token attends to all tokens
before it, so late parts cost more than early ones; with one of each, all ranks have equally much to do.

Only layers that mix tokens look at other ones. All others work on a rank's share as on a shorter sequence:

* the data path gives each rank its share of tokens and labels (`context_share`);
* what depends on positions, such as rotary embeddings, uses `context_positions`;
* attention calls `causal_attention`, or `attention_parts` if it computes the scores itself, or
  `gather_keys_and_values` if tokens also see those after them;
* a recurrence calls `tokens_to_heads` before it and `heads_to_tokens` after it;
* each rank's loss is the mean over its own tokens; the mean over `groups.dp_cp` is that of the batch, for
  losses and for gradients.

Attention gathers the keys and values of the whole sequence over cp, and its backward pass reduce-scatters
their gradients. For each layer that keeps `2 * batch * sequence * heads * head_dim` elements (key heads of
this rank), cp times as many as its own. At cp=16, with 8 query heads for each key head, that is as much as
four hidden states of the rank's share. The alternative passes keys and values around a ring of ranks while it
computes, and merges partial softmaxes: it keeps only a rank's own, and hides the communication, but needs
kernels of its own.

A recurrence needs the tokens in order, and its heads need nothing of each other. So ranks exchange their
tokens of all heads for all tokens of some heads, and back. A rank has as many elements as before. The
projections before and after it, and norms of its output, work on a rank's share. The alternative gathers the
hidden states, projects them with the weights of some heads, and sums over cp: each rank would have whole
sequences of hidden states, and norms over groups of heads would need sums over cp.

A checkpoint does not depend on cp: its ranks are replicas, and `groups.dp_cp` counts them.

Source: Dubey et al. 2024 (Llama 3), section 3.3.2: two parts for each rank, keys and values all-gathered. A
rank's parts are those of Megatron-LM's `get_batch_on_this_cp_rank`. The exchange of tokens for heads is that
of Jacobs et al. 2023 (Ulysses), section 3, and of Megatron-Core's `ssm.mamba_context_parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.training.parallel.collectives import exchange_rows, gather_sequence
from megackpt.training.parallel.groups import Axis


def context_share(x: Tensor, cp: Axis, *, dim: int) -> Tensor:
    """Return this rank's share of `x`, which has whole sequences along `dim`. Local, pure.

    For tokens and labels `[b, s]` give `dim=1`, for hidden states `[s, b, ...]` `dim=0`. With a cp of size 1
    it is `x` itself.

    Raises:
        DeclarationError: the sequence length is not a multiple of `2 * cp`.
    """
    if cp.size == 1:
        return x
    length, count = x.shape[dim], 2 * cp.size
    if length % count:
        raise DeclarationError(
            f"A sequence of {length} tokens cannot be cut into 2 x cp={cp.size} = {count} equal parts. "
            f"Choose a sequence length that is a multiple of {count}, or a smaller cp.",
            rank=cp.ranks[cp.rank],
        )
    return _shares(x, cp.size, dim=dim)[cp.rank]


def context_positions(length: int, cp: Axis, *, device: torch.device | str | None = None) -> Tensor:
    """Return the positions, int64 `[length / cp]`, of this rank's tokens in a sequence of `length`. Local.

    Raises:
        DeclarationError: `length`, that of the whole sequence, is not a multiple of `2 * cp`.
    """
    return context_share(torch.arange(length, device=device), cp, dim=0)


def join_context(shares: Sequence[Tensor], *, dim: int) -> Tensor:
    """Return whole sequences along `dim`, from the shares of all ranks of cp in their order. Local, pure.

    The inverse of `context_share`.

    Raises:
        DeclarationError: a share cannot be cut into its two parts.
    """
    if len(shares) == 1:
        return shares[0]
    return _in_order(torch.cat(list(shares), dim=dim), len(shares), dim=dim)


def gather_context(x: Tensor, cp: Axis, *, dim: int) -> Tensor:
    """Return whole sequences along `dim`, from this rank's share `x`. Collective over cp.

    For computation that each rank does a part of: gradients are summed over cp, and each rank gets those of
    its share.

    Raises:
        DeclarationError: the share cannot be cut into its two parts.
    """
    if cp.size == 1:
        return x
    joined = gather_sequence(x.movedim(dim, 0), cp)
    return _in_order(joined, cp.size, dim=0).movedim(0, dim)


def gather_keys_and_values(keys: Tensor, values: Tensor, cp: Axis) -> tuple[Tensor, Tensor]:
    """Return keys `[..., s, head_dim]` and values `[..., s, value_dim]` of whole sequences.

    Collective over cp. For attention of this rank's queries: gradients are summed over cp, and each rank gets
    those of its share.

    Args:
        keys: `[..., s/cp, head_dim]`, this rank's share.
        values: `[..., s/cp, value_dim]`, this rank's share.
        cp: the ranks that have the other shares.

    Raises:
        DeclarationError: the share cannot be cut into its two parts.
    """
    if cp.size == 1:
        return keys, values
    head_dim = keys.shape[-1]
    both = gather_context(torch.cat((keys, values), dim=-1), cp, dim=-2)  # one collective instead of two
    return both[..., :head_dim], both[..., head_dim:]


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Queries that are neighbours in the sequence, with all keys and values up to the last of them.

    Attributes:
        queries: `[..., n, head_dim]`, of the last `n` of the `m` positions.
        keys: `[..., m, head_dim]`, of positions 0 to m - 1.
        values: `[..., m, value_dim]`, of the same positions.
        window: how many positions a query attends to at most, its own included; None for all.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    window: int | None = None

    @property
    def is_square(self) -> bool:
        """Whether there are as many queries as keys: the part begins at position 0."""
        return self.queries.shape[-2] == self.keys.shape[-2]

    @property
    def mask(self) -> Tensor:
        """Which keys each query attends to, bool `[n, m]`: its own position and those before it.

        With a window, only its last positions.
        """
        queries, keys = self.queries.shape[-2], self.keys.shape[-2]
        # The last query attends to the last key. `is_causal` of torch aligns the first ones instead.
        all_keys = torch.ones(queries, keys, dtype=torch.bool, device=self.queries.device)
        causal = all_keys.tril(keys - queries)
        return causal if self.window is None else causal.triu(keys - queries - self.window + 1)


def attention_parts(
    queries: Tensor, keys: Tensor, values: Tensor, cp: Axis, *, window: int | None = None
) -> tuple[AttentionPart, ...]:
    """Gather keys and values over cp, and return each part of this rank's queries with those it attends to.

    Collective over cp. There are two parts, or one with a cp of size 1. Attention of a rank is that of its
    parts, one after the other along dim -2.

    Args:
        queries: `[..., s/cp, head_dim]`, this rank's share.
        keys: `[..., s/cp, head_dim]`, this rank's share; the leading dims may differ from those of queries.
        values: `[..., s/cp, value_dim]`, this rank's share; leading dims as of keys.
        cp: the ranks that have the other shares.
        window: how many tokens a token attends to at most, itself included; None for all before it.

    Raises:
        DeclarationError: the share cannot be cut into its two parts.
    """
    if cp.size == 1:
        return (AttentionPart(queries, keys, values, window),)
    keys, values = gather_keys_and_values(keys, values, cp)
    ends = [(number + 1) * queries.shape[-2] // 2 for number in (cp.rank, 2 * cp.size - 1 - cp.rank)]
    return tuple(
        AttentionPart(part, keys[..., :end, :], values[..., :end, :], window)
        for part, end in zip(queries.chunk(2, dim=-2), ends, strict=True)
    )


def causal_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cp: Axis,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention of this rank's tokens over the whole sequence. Collective over cp.

    With a cp of size 1 it is `scaled_dot_product_attention(queries, keys, values, is_causal=True)`.

    Args:
        queries: `[b, heads, s/cp, head_dim]`, this rank's share.
        keys: `[b, key_heads, s/cp, head_dim]`, this rank's share; `key_heads` divide `heads`.
        values: `[b, key_heads, s/cp, value_dim]`, this rank's share.
        cp: the ranks that have the other shares.
        window: how many tokens a token attends to at most, itself included; None for all before it.
        scale: what scores are multiplied by; None for `1 / sqrt(head_dim)`.

    Returns:
        `[b, heads, s/cp, value_dim]`.

    Raises:
        DeclarationError: the share cannot be cut into its two parts.
    """
    parts = attention_parts(queries, keys, values, cp, window=window)
    attended = [_attend(part, scale) for part in parts]
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=-2)


def _attend(part: AttentionPart, scale: float | None) -> Tensor:
    is_triangle = part.is_square and (part.window is None or part.window >= part.keys.shape[-2])
    return F.scaled_dot_product_attention(
        part.queries,
        part.keys,
        part.values,
        attn_mask=None if is_triangle else part.mask,  # kernels have a fast path for whole triangles
        is_causal=is_triangle,
        scale=scale,
        enable_gqa=True,
    )


def tokens_to_heads(parts: Sequence[Tensor], heads: Sequence[int], cp: Axis) -> tuple[Tensor, ...]:
    """Return all tokens of this rank's heads, in order, from this rank's tokens of all heads.

    Collective over cp. Gradients go back to the ranks that the elements came from; those of heads with copies
    are summed.

    Args:
        parts: projections `[s/cp, b, n * dim]` of this rank's share, of one dtype.
        heads: the `n` of each part.
        cp: the ranks that have the other shares.

    Returns:
        For each part `[s, b, own * dim]`, the heads of `own_heads`.

    Raises:
        DeclarationError: the share cannot be cut into its two parts.
    """
    if cp.size == 1:
        return tuple(parts)
    shares = [_head_shares(part, n, cp, dim=2) for part, n in zip(parts, heads, strict=True)]
    sent = [torch.cat(of_rank, dim=-1) for of_rank in zip(*shares, strict=True)]
    counts = [len(sent[0])] * cp.size
    whole = _in_order(exchange_rows(torch.cat(sent), cp, counts, counts), cp.size, dim=0)
    return torch.split_with_sizes(whole, [of_part[0].shape[-1] for of_part in shares], dim=-1)


def heads_to_tokens(x: Tensor, cp: Axis) -> Tensor:
    """Return this rank's tokens `[s/cp, b, n]` of all heads, from all tokens `[s, b, n/cp]` of its heads.

    The inverse of `tokens_to_heads` for heads without copies. Collective over cp.
    """
    if cp.size == 1:
        return x
    counts = [len(x) // cp.size] * cp.size
    received = exchange_rows(torch.cat(_shares(x, cp.size, dim=0)), cp, counts, counts)
    return torch.cat(received.chunk(cp.size), dim=-1)


def head_copies(heads: int, cp: Axis) -> int:
    """Return how many copies of each of some heads the ranks of cp have together. Pure.

    It is 1 if cp divides the heads, and `cp / heads` if they are fewer. Copies are neighbours.
    """
    return cp.size // math.gcd(heads, cp.size)


def own_heads(x: Tensor, heads: int, cp: Axis) -> Tensor:
    """Return the rows `[own * dim, ...]` of a parameter `[heads * dim, ...]` for this rank's heads. Local.

    Ranks of cp have equally many heads, one after the other. If cp does not divide them, there are
    `head_copies` of each, one after the other, which are divided. The gradient of `x` is 0 for the heads of
    other ranks: the mean over `groups.dp_cp` is that of the batch, as for all parameters.
    """
    return x if cp.size == 1 else _head_shares(x, heads, cp, dim=0)[cp.rank]


def _head_shares(x: Tensor, heads: int, cp: Axis, *, dim: int) -> tuple[Tensor, ...]:
    """Return what each rank of cp has of `x`, which has `heads * n` elements along `dim`."""
    by_head = x.reshape(*x.shape[:dim], heads, -1, *x.shape[dim + 1 :])
    repeated = by_head.repeat_interleave(head_copies(heads, cp), dim=dim)
    return repeated.flatten(dim, dim + 1).chunk(cp.size, dim=dim)


def _shares(x: Tensor, size: int, *, dim: int) -> list[Tensor]:
    """Return the shares of `size` ranks of `x`, which has whole sequences along `dim`."""
    parts = x.chunk(2 * size, dim=dim)
    return [torch.cat((parts[rank], parts[2 * size - 1 - rank]), dim=dim) for rank in range(size)]


def _in_order(joined: Tensor, size: int, *, dim: int) -> Tensor:
    """Return sequences in the order of positions, from the shares of `size` ranks one after the other."""
    length = joined.shape[dim]
    if length % (2 * size):
        raise DeclarationError(
            f"Shares of {length // size} tokens cannot be cut into their two parts. Give each rank its share "
            f"as context_share cuts it, from a sequence whose length is a multiple of {2 * size}."
        )
    parts = joined.chunk(2 * size, dim=dim)
    first, second = parts[0::2], parts[1::2]  # rank i has part i, and part 2 * size - 1 - i
    return torch.cat([*first, *reversed(second)], dim=dim)
