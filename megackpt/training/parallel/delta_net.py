"""Gated delta net: a mixer of tokens with a state of constant size instead of keys and values of all tokens.

The recurrence is written token by token, in float32. It is right and differentiable everywhere, and slow: a
training run of size puts a fused kernel in the place of `gated_delta_rule`. Between the two projections
each rank of cp has whole sequences of some heads; see `context`.

Source: Yang et al. 2024 (gated delta networks), equation 10; transformers 5.23, `Qwen3NextGatedDeltaNet`
(numerics); Megatron-Core `ssm.gated_delta_net.GatedDeltaNet` (names).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.causal_conv import CausalConv1d
from megackpt.training.parallel.context import heads_to_tokens, own_heads, tokens_to_heads
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.linear import ColumnParallelLinear, RowParallelLinear, divide_over_tp
from megackpt.training.parallel.mixin import ShardedModule
from megackpt.training.parallel.norm import RMSNorm


class GatedDeltaNet(ShardedModule):
    """Gated delta net over `[s, b, hidden]` (`[s/tp, b, hidden]`), heads cut over tp. Collective over tp, cp.

    s is the number of tokens that this rank of cp has of each sequence. The projection of the input has the
    components query, key, value, z (the output's gate), beta (how much is written to the state) and alpha
    (how much of it is kept). A key head belongs to `num_value_heads / num_key_heads` value heads that follow
    each other. `A_log` and `dt_bias` `[num_value_heads/tp]` are float32 in every model.

    Args:
        hidden_size: extent of a hidden state.
        num_key_heads: heads of queries and keys.
        num_value_heads: heads of values, each with a state `[key_head_dim, value_head_dim]`.
        key_head_dim: extent of a query or key.
        value_head_dim: extent of a value.
        groups: the ranks around this one.
        conv_kernel_size: tokens that the convolution of queries, keys and values sees.
        eps: added to the mean square in the norm of the output.
        sequence_parallel: input and output are cut along the sequence.
        dtype: dtype of the other parameters.
        device: where the parameters are.

    Raises:
        DeclarationError: num_key_heads does not divide num_value_heads, tp does not divide num_key_heads, or
            tp x cp does not divide num_value_heads.
    """

    tp_sharding = {"A_log": 0, "dt_bias": 0}  # noqa: RUF012 - read-only by its type in ShardedModule

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        groups: ParallelGroups,
        *,
        conv_kernel_size: int = 4,
        eps: float = 1e-6,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        if num_value_heads % num_key_heads:
            raise DeclarationError(
                f"num_value_heads {num_value_heads} is not a multiple of num_key_heads {num_key_heads}, so "
                f"that value heads cannot share keys evenly. Choose a divisor of {num_value_heads}."
            )
        key_heads = divide_over_tp("num_key_heads", num_key_heads, groups)
        heads = num_value_heads // groups.tp.size
        if heads % groups.cp.size:
            raise DeclarationError(
                f"the {heads} value heads of a rank of tp cannot be divided over cp={groups.cp.size}. Choose "
                f"a num_value_heads that is a multiple of tp x cp = {groups.tp.size * groups.cp.size}, or a "
                f"smaller cp.",
                rank=groups.rank,
            )
        self.local_heads = {"query": key_heads, "key": key_heads, "value": heads}
        self.key_head_dim, self.value_head_dim = key_head_dim, value_head_dim
        keys, values = num_key_heads * key_head_dim, num_value_heads * value_head_dim
        mixed = {"query": keys, "key": keys, "value": values}
        projected = {**mixed, "z": values, "beta": num_value_heads, "alpha": num_value_heads}
        memory: dict[str, Any] = {"dtype": dtype, "device": device}
        linear = {"bias": False, "sequence_parallel": sequence_parallel, **memory}
        self.in_proj = ColumnParallelLinear(hidden_size, projected, groups, **linear)
        self.conv1d = CausalConv1d(
            mixed, conv_kernel_size, groups, bias=False, heads=self.local_heads, **memory
        )
        self.A_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32, device=device))
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=torch.float32, device=device))
        # Each rank of tp has heads of its own, so that the gradients of their norm are partial sums.
        self.out_norm = RMSNorm(value_head_dim, groups, eps=eps, sequence_parallel=True, **memory)
        self.out_proj = RowParallelLinear(values, hidden_size, groups, **linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        cp, heads = self.groups.cp, len(self.A_log)
        q, k, v, z, beta, alpha = self.in_proj.split(self.in_proj(x))
        # From here to heads_to_tokens, s counts all tokens, and heads are those of this rank of tp and cp.
        q, k, v, beta, alpha = tokens_to_heads(
            (q, k, v, beta, alpha), (*self.local_heads.values(), heads, heads), cp
        )
        log_rates, dt_bias = (own_heads(param, heads, cp).float() for param in (self.A_log, self.dt_bias))
        q, k, v = self.conv1d.split(F.silu(self.conv1d(torch.cat([q, k, v], dim=-1))))
        q, k = (_heads(part, self.key_head_dim) for part in (q, k))
        decay = -log_rates.exp() * F.softplus(alpha.float() + dt_bias)
        mixed = gated_delta_rule(q, k, _heads(v, self.value_head_dim), decay, beta.sigmoid())
        mixed, z = (_heads(part, self.value_head_dim) for part in (heads_to_tokens(mixed.flatten(2), cp), z))
        gated = (self.out_norm(mixed).float() * F.silu(z.float())).to(x.dtype)
        out: Tensor = self.out_proj(gated.flatten(2))
        return out


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return what each token reads from the state, `[s, b, value_heads, value_dim]`, in the dtype of `v`.

    The state of a head starts at zero. Each token lets it decay, replaces a part of the value that it has for
    the token's key, and reads it with the token's query. Queries and keys are divided by their lengths,
    queries also by the root of their extent. Pure.

    Args:
        q: queries `[s, b, key_heads, key_dim]`.
        k: keys, shaped like queries.
        v: values `[s, b, value_heads, value_dim]`.
        decay: logarithms of what is kept of the state, `[s, b, value_heads]`, at most 0.
        beta: part of the value that is replaced, `[s, b, value_heads]`, in [0, 1].
    """
    shared = v.shape[2] // k.shape[2]
    q, k = (_of_length_one(part.float()).repeat_interleave(shared, dim=2) for part in (q, k))
    q = q * q.shape[-1] ** -0.5
    state = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1], dtype=torch.float32)
    outputs = []
    for query, key, value, kept, part in zip(q, k, v.float(), decay.exp(), beta.float(), strict=True):
        state = state * kept[..., None, None]
        known = torch.einsum("bhk,bhkv->bhv", key, state)
        change = (value - known) * part[..., None]
        state = state + key[..., :, None] * change[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, state))
    return torch.stack(outputs).to(v.dtype)


def _heads(part: Tensor, dim: int) -> Tensor:
    """Return a projection `[s, b, n * dim]` as heads `[s, b, n, dim]`."""
    return part.view(*part.shape[:-1], -1, dim)


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
