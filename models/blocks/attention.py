"""Attention with heads cut over tp: what all kinds have, and causal self-attention with grouped queries.

The arithmetic between the projections. Sequences of causal self-attention may be cut over cp.

Source: Ainslie et al. 2023 (grouped queries); Gemma 2, section 2 (soft caps); transformers `gpt_oss` (sinks)
and `qwen3_next` (output gates).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megackpt.training.parallel import (
    ParallelDropout,
    QKVParallelLinear,
    RowParallelLinear,
    ShardedModule,
    causal_attention,
    context_positions,
)
from megackpt.training.parallel.attention import join_heads, split_heads
from megackpt.training.parallel.context import attention_parts
from models.block_config import DynamicScaling, LinearScaling, Llama3Scaling, RotaryConfig, YarnScaling
from models.blocks.norm import head_norm
from models.stage import Stage

# Rotary positions: the frequencies of each kind of scaling, and the rotation of queries and keys.
#
# Frequencies are float32 and computed in the order of operations of transformers: at position 100,000 the
# last bit of a frequency turns by a hundredth of a radian.
#
# Source: Su et al. 2021, section 3.4.2 (halves rotated as in GPT-NeoX); the scalings name theirs.


class Rotation(NamedTuple):
    """Cosines and sines, float32 `[s, rotated_dims / 2]`, of the angles at some positions.

    If it is interleaved, neighbouring dims are a pair; the rotated pairs are put as if it were not.
    """

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False


def rotation(config: RotaryConfig, head_dim: int, positions: Tensor, length: int) -> Rotation:
    """Return the rotation at `positions` `[s]` of sequences of `length` tokens. Pure."""
    dims = config.rotated_dims(head_dim)
    frequency = rotary_frequencies(config, dims, length, device=positions.device)
    angle = torch.outer(positions.float(), frequency)
    magnitude = rotary_magnitude(config)
    return Rotation(angle.cos() * magnitude, angle.sin() * magnitude, config.interleaved)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Return queries or keys `[b, n, s, head_dim]` with their first dims rotated. Pure."""
    half = by.cos.shape[-1]
    pairs, rest = torch.split_with_sizes(x.float(), [2 * half, x.shape[-1] - 2 * half], dim=-1)
    # The order of the result does not matter: it is the same for queries and keys.
    first, second = (pairs[..., ::2], pairs[..., 1::2]) if by.is_interleaved else pairs.chunk(2, dim=-1)
    cos, sin = by.cos, by.sin
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def rotary_frequencies(
    config: RotaryConfig, dims: int, length: int, *, device: torch.device | None = None
) -> Tensor:
    """Return the angles per position, float32 `[dims / 2]`, for sequences of `length` tokens. Pure."""
    scaling = config.scaling
    base = config.base
    if isinstance(scaling, DynamicScaling):
        base *= _dynamic_growth(scaling, dims, length)
    power = base ** (torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims)
    frequency = 1.0 / power
    if isinstance(scaling, LinearScaling):
        return frequency / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequency, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(power, scaling, base)
    return frequency


def rotary_magnitude(config: RotaryConfig) -> float:
    """Return what sines and cosines are multiplied by. Pure."""
    if not isinstance(config.scaling, YarnScaling):
        return 1.0
    if config.scaling.magnitude is not None:
        return config.scaling.magnitude
    return 0.1 * math.log(max(config.scaling.factor, 1.0)) + 1.0


def _dynamic_growth(scaling: DynamicScaling, dims: int, length: int) -> float:
    """Return how many times larger the base is; 1 for sequences of at most the original length."""
    longer = max(length, scaling.original_length) / scaling.original_length
    growth: float = (scaling.factor * longer - (scaling.factor - 1)) ** (dims / (dims - 2))
    return growth


def _llama3(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelength = 2 * math.pi / frequency
    weight = (scaling.original_length / wavelength - low) / (high - low)
    between = (1 - weight) * frequency / scaling.factor + weight * frequency
    is_low, is_high = wavelength > scaling.original_length / low, wavelength < scaling.original_length / high
    return torch.where(is_low, frequency / scaling.factor, torch.where(is_high, frequency, between))


def _yarn(power: Tensor, scaling: YarnScaling, base: float) -> Tensor:
    dims = 2 * len(power)
    start, stop = (_dim_of(turns, scaling, dims, base) for turns in (scaling.fast_turns, scaling.slow_turns))
    if scaling.whole_dims:
        start, stop = math.floor(start), math.ceil(stop)
    start, stop = max(start, 0), min(stop, dims - 1)
    if start == stop:
        stop += 0.001  # a step instead of a ramp
    numbers = torch.arange(dims // 2, dtype=torch.float32, device=power.device)
    kept = 1 - ((numbers - start) / (stop - start)).clamp(0, 1)
    return 1.0 / (scaling.factor * power) * (1 - kept) + 1.0 / power * kept


def _dim_of(turns: float, scaling: YarnScaling, dims: int, base: float) -> float:
    """Return which frequency, as a number of its dim, makes so many turns within the original length."""
    return dims * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


class Attention(ShardedModule):
    """What all kinds of attention have: how queries weigh values. Heads are cut over tp; local.

    Args:
        stage: what its parts are made with.
    """

    tp_sharding = {"softmax_offset": 0}  # noqa: RUF012 - read-only by its type in ShardedModule
    softmax_offset: nn.Parameter | None

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        self.choose(stage)

    def choose(self, stage: Stage) -> None:
        """Take over the config's choices of how queries weigh values.

        Subclasses that get their projections from a layer of the package call it instead of `__init__`.
        """
        self.softmax_offset = None
        config, choices = stage.config, stage.config.attention
        self.scale = config.head_dim**-0.5 if choices.scale is None else choices.scale
        self.softcap = choices.softcap
        # Each rank of tp has heads of its own, so each draws for itself.
        self.dropout = ParallelDropout(config.dropout, stage.rng, "distinct")

    @property
    def has_fused_kernel(self) -> bool:
        """Whether torch's fused kernels compute this attention.

        They have neither soft caps nor sinks, and draw from torch's global generator, which no checkpoint of
        ours restores.
        """
        return not self.dropout.is_active and self.softcap is None and self.softmax_offset is None

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention as it is written in papers, `[b, heads/tp, n, value_dim]`.

        Args:
            q: queries `[b, heads/tp, n, head_dim]`.
            k: keys `[b, key_heads/tp, m, head_dim]`.
            v: values `[b, key_heads/tp, m, value_dim]`.
            mask: which keys each query attends to, bool, or what is added to the scores; it can be expanded
                to `[b, heads/tp, n, m]`. None attends to all.
        """
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * self.scale  # [b, heads/tp, n, m]
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        dropped: Tensor = self.dropout(self._softmax(scores).to(v.dtype))
        return dropped @ v

    def _softmax(self, scores: Tensor) -> Tensor:
        """Softmax over the keys; a sink is one more key, whose value is zero."""
        if self.softmax_offset is None:
            return scores.softmax(dim=-1)
        batch, count, queries, _ = scores.shape
        offsets = self.softmax_offset.float().view(1, count, 1, 1).expand(batch, count, queries, 1)
        return torch.cat([scores, offsets], dim=-1).softmax(dim=-1)[..., :-1]


class CausalAttention(Attention):
    """What all kinds of causal self-attention have: positions and windows. Collective over tp and cp.

    s is the number of tokens that this rank of cp has of each sequence; it attends to all of them, or to the
    last ones if the layer has a window.

    Args:
        stage: what its parts are made with.
        index: global index of the layer, which decides about the window and the positions.
    """

    def __init__(self, stage: Stage, index: int) -> None:
        super().__init__(stage)
        self.choose_positions(stage, index)

    def choose_positions(self, stage: Stage, index: int) -> None:
        """Take over the config's window and positions of a layer, as `choose` does its choices."""
        self.window = stage.config.window_of(index)
        self.rotary = stage.config.rotary_of(index)

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
        return join_heads(self._attend(q, k, v))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.has_fused_kernel:
            return causal_attention(q, k, v, self.groups.cp, window=self.window, scale=self.scale)
        parts = attention_parts(q, k, v, self.groups.cp, window=self.window)
        return torch.cat([self.weigh(p.queries, p.keys, p.values, p.mask) for p in parts], dim=2)


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
        self.linear_qkv = input_projection(stage)
        self.q_layernorm = head_norm(stage) if choices.qk_norm else None
        self.k_layernorm = head_norm(stage) if choices.qk_norm else None
        self.softmax_offset = sinks(stage)
        self.linear_proj = output_projection(stage)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped like `x`."""
        q, *gate, k, v = self.linear_qkv.split(self.linear_qkv(x))
        q, k, v = (split_heads(part, self.head_dim) for part in (q, k, v))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = self.with_positions(q, k)
        attended = self.attend(q, k, v)
        out: Tensor = self.linear_proj(attended * gate[0].sigmoid() if gate else attended)
        return out


def has_input_bias(stage: Stage) -> bool:
    """Return whether the projections of attention's input have a bias."""
    bias = stage.config.attention.qkv_bias
    return stage.config.linear_bias if bias is None else bias


def has_output_bias(stage: Stage) -> bool:
    """Return whether the projection of attention's output has a bias."""
    bias = stage.config.attention.output_bias
    return stage.config.linear_bias if bias is None else bias


def input_projection(stage: Stage) -> QKVParallelLinear:
    """Return the projection to queries, keys and values, and to the output gate if there is one."""
    config = stage.config
    return QKVParallelLinear(
        config.hidden_size,
        config.num_heads,
        config.query_groups,
        config.head_dim,
        stage.groups,
        bias=has_input_bias(stage),
        output_gate=config.attention.output_gate,
        sequence_parallel=stage.sequence_parallel,
        dtype=config.params_dtype,
        device=stage.device,
    )


def output_projection(stage: Stage) -> RowParallelLinear:
    """Return the projection of what all heads make of their values."""
    config = stage.config
    return RowParallelLinear(
        config.num_heads * config.head_dim,
        config.hidden_size,
        stage.groups,
        bias=has_output_bias(stage),
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
