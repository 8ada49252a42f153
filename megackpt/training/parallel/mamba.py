"""The Mamba-2 mixer: a state for each head, which tokens decay, add to and read from. Heads are cut over tp.

The projections, the convolution and the norm; `selective_scan` has the recurrence. Between the two
projections each rank of cp has whole sequences of some heads; see `context`.

Source: Dao and Gu 2024 (Mamba-2), sections 6 and 7; Megatron-Core `ssm.mamba_mixer.MambaMixer` (names and
what is cut); transformers `NemotronHMamba2Mixer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.causal_conv import CausalConv1d
from megackpt.training.parallel.collectives import copy_to, reduce_from
from megackpt.training.parallel.context import heads_to_tokens, own_heads, tokens_to_heads
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from megackpt.training.parallel.linear import ColumnParallelLinear, RowParallelLinear, divide_over_tp
from megackpt.training.parallel.mixin import ShardedModule

# The recurrence of Mamba-2, chunk by chunk, in plain torch: right at any size, and not fast.
#
# Source: Dao and Gu 2024 (Mamba-2), section 6 (equation 16 is the recurrence).


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """Sizes and choices of a Mamba-2 mixer.

    Attributes:
        num_heads: heads, each with a state of its own.
        head_dim: extent of one head.
        state_size: extent of the state of each dim of a head.
        num_groups: groups of heads that have the same B and C, and whose outputs are normalised together.
        kernel: tokens that the convolution looks at, the token itself included.
        chunk_size: tokens that are computed at once; it changes rounding only.
        bias: whether the projections have biases.
        conv_bias: whether the convolution has one.
        time_step_limit: smallest and largest time step.
        norm_eps: added to the mean square in the norm of the output.

    Raises:
        DeclarationError: a size below 1, or groups that do not divide the heads.

    Source: transformers `Mamba2Config` and `NemotronHConfig`; Megatron-Core `TransformerConfig`
    (`mamba_num_heads`, `mamba_head_dim`, `mamba_state_dim`, `mamba_num_groups`).
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    kernel: int = 4
    chunk_size: int = 128
    bias: bool = False
    conv_bias: bool = True
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "kernel", "chunk_size"):
            if getattr(self, name) < 1:
                raise DeclarationError(f"MambaSizes.{name} is {getattr(self, name)}. It must be at least 1.")
        if self.num_heads % self.num_groups:
            raise DeclarationError(
                f"MambaSizes.num_groups {self.num_groups} does not divide num_heads {self.num_heads}. Choose "
                f"a divisor."
            )

    @property
    def inner_size(self) -> int:
        """Extent of all heads."""
        return self.num_heads * self.head_dim

    def faults(self, layout: ParallelLayout) -> list[str]:
        """Return what does not fit `layout`, in words; empty if all does. Pure."""
        faults, tp, cp = [], layout.tp, layout.cp
        if self.num_heads % (tp * cp):
            cut = f"tp={tp}" if cp == 1 else f"tp={tp} x cp={cp} = {tp * cp}"
            faults.append(f"num_heads {self.num_heads} of Mamba is not a multiple of {cut}")
        if self.num_groups % tp and tp % self.num_groups:
            faults.append(
                f"num_groups {self.num_groups} of Mamba is neither a multiple nor a divisor of tp={tp}"
            )
        return faults


class MambaMixer(ShardedModule):
    """The Mamba-2 mixer over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp and cp.

    s is the number of tokens that this rank of cp has of each sequence. The input projection and the
    convolution are fused: z, x and dt are cut over tp by heads, B and C by groups. With more ranks in tp than
    groups, neighbouring ranks have the same group. `A_log`, `D` and `dt_bias` `[heads/tp]` are float32
    whatever the dtype is.

    Args:
        hidden_size: extent of the last dim of input and output.
        sizes: sizes of the mixer.
        groups: the ranks around this one.
        sequence_parallel: the input is cut along the sequence, dim 0.
        dtype: dtype of the other parameters.
        device: where the parameters are.

    Raises:
        DeclarationError: the layout cannot hold the mixer: see `MambaSizes.faults`.
    """

    tp_sharding = {"A_log": 0, "D": 0, "dt_bias": 0}  # noqa: RUF012 - read-only by its type in ShardedModule
    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        sizes: MambaSizes,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        if faults := sizes.faults(groups.layout):
            raise DeclarationError(
                f"MambaSizes does not fit {groups.layout}: {'; '.join(faults)}. Change either."
            )
        self.sizes = sizes
        copies = max(1, groups.tp.size // sizes.num_groups)
        heads = divide_over_tp("num_heads", sizes.num_heads, groups)
        shared = sizes.num_groups * copies // groups.tp.size
        self.local_heads = {"x": heads, "B": shared, "C": shared}
        of_groups = sizes.num_groups * sizes.state_size
        channels = {"x": sizes.inner_size, "B": of_groups, "C": of_groups}
        projected = {"z": sizes.inner_size, **channels, "dt": sizes.num_heads}
        memory: dict[str, Any] = {"dtype": dtype, "device": device}
        linear = {"bias": sizes.bias, "sequence_parallel": sequence_parallel, **memory}
        shared_slices = {"B": copies, "C": copies}
        self.in_proj = ColumnParallelLinear(hidden_size, projected, groups, copies=shared_slices, **linear)
        convolution = {"bias": sizes.conv_bias, "heads": self.local_heads, **memory}
        self.conv1d = CausalConv1d(channels, sizes.kernel, groups, copies=shared_slices, **convolution)
        for name, value in (("A_log", 0.0), ("D", 1.0), ("dt_bias", 1.0)):
            start = torch.full((heads,), value, dtype=torch.float32, device=device)
            self.register_parameter(name, nn.Parameter(start))
        self.norm = GatedGroupNorm(sizes.inner_size, sizes.num_groups, groups, eps=sizes.norm_eps, **memory)
        self.out_proj = RowParallelLinear(sizes.inner_size, hidden_size, groups, **linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        sizes, cp = self.sizes, self.groups.cp
        z, *parts = self.in_proj.split(self.in_proj(x))
        heads = len(self.A_log)
        # From here to heads_to_tokens, s counts all tokens, and heads are those of this rank of tp and cp.
        *channels, dt = tokens_to_heads(parts, (*self.local_heads.values(), heads), cp)
        log_rates, skips, dt_bias = (own_heads(p, heads, cp) for p in (self.A_log, self.D, self.dt_bias))
        convolved = self.conv1d.split(F.silu(self.conv1d(torch.cat(channels, dim=-1))))
        dims = (sizes.head_dim, sizes.state_size, sizes.state_size)
        x, b, c = (_split_last(part, dim).float() for part, dim in zip(convolved, dims, strict=True))
        steps = F.softplus(dt.float() + dt_bias).clamp(*sizes.time_step_limit)  # [s, b, heads]
        y = selective_scan(x, steps, -log_rates.exp(), b, c, chunk_size=sizes.chunk_size)
        y = y + skips.unsqueeze(-1) * x
        y = heads_to_tokens(y.flatten(-2).to(z.dtype), cp)
        out: Tensor = self.out_proj(self.norm(y, z))
        return out


class GatedGroupNorm(ShardedModule):
    """`n(y * silu(z)) * weight`, where n divides each group of features by its root mean square.

    Input and output `[s, b, size/tp]`; weight `[size/tp]`. Collective over tp if there are fewer groups than
    ranks: neighbouring ranks then add the squares of their parts of a group.

    Args:
        size: number of features.
        num_groups: groups that they are in; it divides size.
        groups: the ranks around this one.
        eps: added to the mean square.
        dtype: dtype of the weight; the statistics are computed in float32.
        device: where the weight is.

    Raises:
        DeclarationError: tp does not divide the features, or neither of tp and num_groups divides the other.

    Source: Megatron-Core `ssm.mamba_mixer.ExtendedRMSNorm`; transformers `MambaRMSNormGated`.
    """

    tp_sharding = {"weight": 0}  # noqa: RUF012 - read-only by its type in ShardedModule

    def __init__(
        self,
        size: int,
        num_groups: int,
        groups: ParallelGroups,
        *,
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        local, tp = divide_over_tp("size", size, groups), groups.tp
        self.ranks_per_group = max(1, tp.size // num_groups)
        divide_over_tp("num_groups", num_groups * self.ranks_per_group, groups)
        self.num_groups, self.group_size, self.eps = num_groups, size // num_groups, eps
        self.weight = nn.Parameter(torch.ones(local, dtype=dtype, device=device))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Return the normalised features, shaped like `y` and of its dtype."""
        wide = y.float() * F.silu(z.float())
        # A rank has whole groups, or a part of one.
        wide_groups = _split_last(wide, self.group_size // self.ranks_per_group)
        squares = wide_groups.square().sum(dim=-1, keepdim=True)
        if self.ranks_per_group > 1:
            squares = self._over_group(squares)
        normalised = wide_groups * torch.rsqrt(squares / self.group_size + self.eps)
        return (normalised.flatten(-2) * self.weight.float()).to(y.dtype)

    def _over_group(self, squares: Tensor) -> Tensor:
        """Sum `[s, b, 1, 1]` over the neighbours that have a part of the same group. Collective over tp."""
        tp = self.groups.tp
        group = tp.rank // self.ranks_per_group
        # One entry for each group, as neighbours have no process group: a rank adds zeros to the others.
        is_own = (torch.arange(self.num_groups, device=squares.device) == group).to(squares.dtype)
        of_all: Tensor = copy_to(reduce_from(squares * is_own.unsqueeze(-1), tp), tp)
        return of_all[..., [group], :]


def _split_last(x: Tensor, size: int) -> Tensor:
    """Return `[..., n * size]` as `[..., n, size]`."""
    return x.view(*x.shape[:-1], -1, size)
