"""The recurrence of Mamba-2, chunk by chunk, in plain torch: right at any size, and not fast.

Source: Dao and Gu 2024 (Mamba-2), section 6 (equation 16 is the recurrence).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def selective_scan(
    x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor, *, chunk_size: int
) -> Tensor:
    """Return `y[t] = c[t] state[t]`, `state[t] = exp(steps[t] rates) state[t-1] + steps[t] b[t] x[t]`. Pure.

    y is shaped like x. The state of each head is `[dim, state]` and starts at zero. Within a chunk all tokens
    are computed at once; the state goes from chunk to chunk in order.

    Args:
        x: `[s, b, heads, dim]`, float32 as all others.
        steps: time steps `[s, b, heads]`.
        rates: `[heads]`, at most 0: how fast a state decays.
        b: what a token writes, `[s, b, groups, state]`; the heads are in as many groups of equal size.
        c: what a token reads, shaped like `b`.
        chunk_size: tokens of a chunk.
    """
    heads_per_group = x.shape[2] // b.shape[2]
    b, c = (part.repeat_interleave(heads_per_group, dim=2) for part in (b, c))  # [s, b, heads, state]
    written = steps.unsqueeze(-1) * x
    state = x.new_zeros(*x.shape[1:], b.shape[-1])  # [b, heads, dim, state]
    outputs = []
    chunks = (torch.split(part, chunk_size) for part in (written, steps * rates, b, c))
    for own_x, own_decay, own_b, own_c in zip(*chunks, strict=True):
        decay = own_decay.cumsum(dim=0)  # log of the decay from the start of the chunk, [t, b, heads]
        scores = torch.einsum("tbhn,ubhn->tubh", own_c, own_b) * _decay_between(decay)
        from_state = torch.einsum("tbhn,bhpn->tbhp", own_c, state) * decay.exp().unsqueeze(-1)
        outputs.append(torch.einsum("tubh,ubhp->tbhp", scores, own_x) + from_state)
        to_end = (decay[-1] - decay).exp().unsqueeze(-1)
        state = state * decay[-1].exp()[..., None, None]
        state = state + torch.einsum("ubhp,ubhn->bhpn", own_x * to_end, own_b)
    return torch.cat(outputs)


def _decay_between(decay: Tensor) -> Tensor:
    """Return the decay `[t, u, b, heads]` from token u to token t of a chunk; 0 where u comes after t."""
    later = torch.ones(2 * (len(decay),), dtype=torch.bool, device=decay.device).triu(1)
    between = decay.unsqueeze(1) - decay.unsqueeze(0)
    return between.masked_fill(later[..., None, None], -math.inf).exp()
