"""Choices of the blocks of a transformer, one value for each decision. Sizes are those of `GPTConfig`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from megackpt.errors import DeclarationError
from megackpt.training.parallel import Capacity, LatentSizes, ParallelLayout, RoutingOptions, SwiGLU


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """The norms of the model: those before the blocks, and the one at its end.

    Attributes:
        kind: "rms" divides by the root mean square; "layer" subtracts the mean too, and has a bias.
        zero_centred: the weight is what is added to 1, so it starts at 0 (Gemma). For "rms" only.
        after_blocks: the output of attention and that of the MLP pass a norm of their own before they are
            added to the residual path (Gemma 2 and 3).

    Raises:
        DeclarationError: a kind that does not exist, or a zero-centred "layer".
    """

    kind: Literal["rms", "layer"] = "rms"
    zero_centred: bool = False
    after_blocks: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("rms", "layer"):
            raise DeclarationError(f"NormConfig.kind is {self.kind!r}. Give 'rms' or 'layer'.")
        if self.zero_centred and self.kind == "layer":
            raise DeclarationError(
                "NormConfig.zero_centred is for kind 'rms' only. Set it to False, or choose that kind."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All rotary frequencies divided by `factor`: positions are interpolated.

    Source: Chen et al. 2023 (position interpolation).
    """

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """A larger base for sequences that are longer than `original_length` (NTK-aware scaling).

    The base depends on the length of the sequence that the model is called with. It is not remembered: a
    short sequence after a long one is computed as if it came first.

    Source: transformers, rope type "dynamic".
    """

    factor: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between interpolated.

    A frequency is low if it turns fewer than `low_frequency_factor` times within `original_length` tokens,
    and high if more than `high_frequency_factor` times.

    Raises:
        DeclarationError: high_frequency_factor is not larger than low_frequency_factor.

    Source: Llama 3.1; transformers, rope type "llama3".
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int

    def __post_init__(self) -> None:
        if not self.low_frequency_factor < self.high_frequency_factor:
            raise DeclarationError(
                f"Llama3Scaling.high_frequency_factor is {self.high_frequency_factor}. It must be larger "
                f"than low_frequency_factor, {self.low_frequency_factor}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Low frequencies divided by `factor`, high ones kept, with a ramp between; sines and cosines grow.

    Attributes:
        factor: how many times longer sequences may be.
        original_length: tokens of the sequences before.
        fast_turns: frequencies with at least so many turns within `original_length` are kept.
        slow_turns: frequencies with at most so many turns are divided by `factor`.
        magnitude: what sines and cosines are multiplied by; None for `0.1 ln(factor) + 1`.
        whole_dims: whether the ends of the ramp are rounded to whole dims, outwards.

    Source: Peng et al. 2023 (YaRN), section 3; transformers, rope type "yarn".
    """

    factor: float
    original_length: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    magnitude: float | None = None
    whole_dims: bool = True


RotaryScaling: TypeAlias = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Rotary positions.

    Attributes:
        base: base of the frequencies.
        fraction: part of each head that is rotated, its first dims; the others do not see positions.
        interleaved: a pair that is rotated consists of neighbouring dims, instead of dims that are half of
            the rotated ones apart.
        scaling: how the frequencies change for longer sequences; None if they do not.

    Raises:
        DeclarationError: a base of at most 1, a fraction outside of (0, 1], or a factor that is not positive.
    """

    base: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise DeclarationError(f"RotaryConfig.base is {self.base}. It must be larger than 1.")
        if not 0 < self.fraction <= 1:
            raise DeclarationError(f"RotaryConfig.fraction is {self.fraction}. It must be in (0, 1].")
        if self.scaling is not None and self.scaling.factor <= 0:
            raise DeclarationError(
                f"RotaryConfig.scaling has factor {self.scaling.factor}; give a positive one."
            )

    def rotated_dims(self, head_dim: int) -> int:
        """Return how many of the dims of a head are rotated. Pure."""
        return int(head_dim * self.fraction)

    @property
    def min_dims(self) -> int:
        """The fewest dims that can be rotated."""
        return 4 if isinstance(self.scaling, DynamicScaling) else 2  # its exponent is dims / (dims - 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositions:
    """A vector for each position, added to the embeddings (GPT-2). `count` of them."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPositions:
    """Attention that does not see positions, but by its mask: other blocks tell them (Nemotron-H)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Attention to the last tokens only, in some or all layers.

    Attributes:
        size: tokens that a token attends to, itself included.
        layers: for each layer of the model, whether it has the window; None if all have.
        rotary: rotary positions of the layers with the window; None for those of the other layers.

    Raises:
        DeclarationError: a size below 1.
    """

    size: int
    layers: tuple[bool, ...] | None = None
    rotary: RotaryConfig | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DeclarationError(f"SlidingWindow.size is {self.size}. It must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Choices of self-attention.

    Attributes:
        head_dim: extent of one head; None for hidden_size / num_heads.
        qkv_bias: whether the projection of queries, keys and values has a bias; None for `linear_bias`.
        output_bias: whether the projection of the output has one; None for `linear_bias`.
        qk_norm: whether each head of the queries and keys passes a norm, before its positions.
        scale: what the scores are multiplied by; None for `1 / sqrt(head_dim)`.
        softcap: scores become `softcap * tanh(scores / softcap)`; None leaves them as they are.
        sinks: whether each head has a learned score of nothing, which takes part in the softmax (GPT-OSS).
        window: which layers see the last tokens only; None if none does.
        latent: sizes of latent attention; None projects hidden states to queries, keys and values.
        output_gate: whether what the heads return is multiplied by a sigmoid of the token (Qwen3-Next).

    Raises:
        DeclarationError: a head_dim below 1, a softcap that is not positive, or latent attention with a
            head_dim or norms of queries and keys, which it has of its own, or with an output gate.

    Source: Megatron-Core `TransformerConfig` (`kv_channels`, `qk_layernorm`, `softmax_scale`, `softmax_type`,
    `window_size`, `attention_output_gate`).
    """

    head_dim: int | None = None
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    window: SlidingWindow | None = None
    latent: LatentSizes | None = None
    output_gate: bool = False

    def __post_init__(self) -> None:
        if self.latent is not None and self.output_gate:
            raise DeclarationError(
                "AttentionConfig.output_gate is True with latent attention, which has none. Set it to False."
            )
        if self.latent is not None and (self.head_dim is not None or self.qk_norm):
            raise DeclarationError(
                f"AttentionConfig.head_dim is {self.head_dim} and qk_norm is {self.qk_norm} with latent "
                f"attention, whose sizes and norms are its own. Leave them at None and False."
            )
        if self.head_dim is not None and self.head_dim < 1:
            raise DeclarationError(f"AttentionConfig.head_dim is {self.head_dim}. It must be at least 1.")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise DeclarationError(
                f"AttentionConfig.softcap is {self.softcap}. Give a positive number or None."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Gated delta nets, which layers may have instead of attention (Qwen3-Next).

    Attributes:
        num_key_heads: heads of queries and keys.
        num_value_heads: heads of values; a multiple of num_key_heads.
        key_head_dim: extent of a query or key.
        value_head_dim: extent of a value.
        conv_kernel_size: tokens that the convolution of queries, keys and values sees.

    Raises:
        DeclarationError: a size below 1, or value heads that cannot share keys evenly.

    Source: Megatron-Core `TransformerConfig` (`linear_num_key_heads`, ...).
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int = 4

    def __post_init__(self) -> None:
        for name in (
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_kernel_size",
        ):
            if getattr(self, name) < 1:
                raise DeclarationError(
                    f"DeltaNetConfig.{name} is {getattr(self, name)}. It must be at least 1."
                )
        if self.num_value_heads % self.num_key_heads:
            raise DeclarationError(
                f"DeltaNetConfig.num_value_heads {self.num_value_heads} is not a multiple of num_key_heads "
                f"{self.num_key_heads}. Choose a divisor."
            )

    def faults(self, layout: ParallelLayout) -> list[str]:
        """Return what does not fit `layout`, in words; empty if all does. Pure."""
        faults = []
        if self.num_key_heads % layout.tp:
            faults.append(f"num_key_heads {self.num_key_heads} is not a multiple of tp={layout.tp}")
        ranks = layout.tp * layout.cp
        if layout.cp > 1 and self.num_value_heads % ranks:
            faults.append(
                f"num_value_heads {self.num_value_heads} is not a multiple of "
                f"tp={layout.tp} x cp={layout.cp} = {ranks}"
            )
        return faults


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction: layers after the model, which training uses and evaluation does not.

    Attributes:
        num_layers: number of layers. Each predicts one token further; they are as the model's last layer.
        loss_weight: factor on the mean of their losses, which is added to that of the model.

    Raises:
        DeclarationError: fewer than 1 layer, or a negative weight.

    Source: DeepSeek-V3, section 2.2.
    """

    num_layers: int = 1
    loss_weight: float = 0.1

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.loss_weight < 0:
            raise DeclarationError(
                f"MTPConfig.num_layers is {self.num_layers} and loss_weight is {self.loss_weight}. Give at "
                f"least 1 and at least 0."
            )


Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Choices of the MLP.

    Attributes:
        gated: `down(activation(gate(x)) * up(x))`; otherwise `down(activation(up(x)))`.
        activation: the function between; "gelu_tanh" is the approximation of GELU by a tanh.
        bias: whether its linear layers have biases; None for `linear_bias`.

    Raises:
        DeclarationError: an activation that does not exist.
    """

    gated: bool = True
    activation: Activation = "silu"
    bias: bool | None = None

    def __post_init__(self) -> None:
        if self.activation not in get_args(Activation):
            raise DeclarationError(
                f"MLPConfig.activation is {self.activation!r}. Give one of {', '.join(get_args(Activation))}."
            )


# What a mixture of experts is, independent of how many ranks it runs on.


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The mixture of experts that some or all layers have instead of one gated MLP.

    Attributes:
        num_experts: routed experts of a layer.
        ffn_hidden_size: extent inside of one of them.
        routing: how tokens are routed, and which losses balance the experts.
        capacity: limit on the tokens of an expert; None drops no token.
        shared_ffn_hidden_size: extent inside of the shared experts, which all tokens go to; 0 for none.
        shared_gate: whether the shared experts' output is multiplied by a sigmoid of the token.
        gated: whether all experts are gated; otherwise they are `down(activation(up(x)))` with the activation
            of `GPTConfig.mlp`.
        activation: of the routed experts, between their projections, if they are gated.
        bias: whether the routed experts' linear layers have biases; None for `linear_bias`.
        router_bias: whether the router's logits have a trained bias. It has an influence on the weights, too,
            which the bias of `RoutingOptions.bias_rate` has not.
        layer_freq: which layers have experts: layers 0, n, 2n, ... for a number n; for a sequence, those with
            a 1 of the 0 and 1 for each layer.

    Raises:
        DeclarationError: a size below 1, routing options that do not fit the number of experts, a gate
            without shared experts, or for some that are not gated themselves, a sequence of other values than
            0 and 1.

    Source: Megatron-Core `TransformerConfig` (`moe_layer_freq`, `moe_shared_expert_intermediate_size`).
    """

    num_experts: int
    ffn_hidden_size: int
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    capacity: Capacity | None = None
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    gated: bool = True
    activation: SwiGLU = field(default_factory=SwiGLU)
    bias: bool | None = None
    router_bias: bool = False
    layer_freq: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "ffn_hidden_size"):
            if getattr(self, name) < 1:
                raise DeclarationError(f"MoEConfig.{name} is {getattr(self, name)}. It must be at least 1.")
        if faults := self.routing.faults(self.num_experts):
            raise DeclarationError(f"MoEConfig.routing does not fit: {'; '.join(faults)}. Change either.")
        if self.shared_ffn_hidden_size < 0 or (self.shared_gate and not self.shared_ffn_hidden_size):
            raise DeclarationError(
                f"MoEConfig.shared_ffn_hidden_size is {self.shared_ffn_hidden_size} and shared_gate is "
                f"{self.shared_gate}. Give the shared experts a size, or have neither."
            )
        if self.shared_gate and not self.gated:
            raise DeclarationError(
                "MoEConfig.shared_gate is for gated experts only. Leave it False, or choose gated."
            )
        if isinstance(self.layer_freq, int):
            if self.layer_freq < 1:
                raise DeclarationError(f"MoEConfig.layer_freq is {self.layer_freq}. It must be at least 1.")
        elif set(self.layer_freq) - {0, 1}:
            raise DeclarationError(
                f"MoEConfig.layer_freq is {self.layer_freq}. Give a 0 (dense) or 1 (experts) for each layer."
            )

    def pattern(self, num_layers: int) -> tuple[bool, ...]:
        """Return for each of `num_layers` layers whether it has experts. Pure."""
        if isinstance(self.layer_freq, int):
            return tuple(index % self.layer_freq == 0 for index in range(num_layers))
        return tuple(map(bool, self.layer_freq))

    def faults(self, layout: ParallelLayout) -> list[str]:
        """Return what does not fit `layout`, in words; empty if all does. Pure."""
        cuts = (
            ("num_experts", self.num_experts, "ep", layout.ep),
            ("ffn_hidden_size of experts", self.ffn_hidden_size, "etp", layout.etp),
            ("shared_ffn_hidden_size", self.shared_ffn_hidden_size, "tp", layout.tp),
        )
        return [f"{name} {n} is not a multiple of {axis}={size}" for name, n, axis, size in cuts if n % size]
