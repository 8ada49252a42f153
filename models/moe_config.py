"""What a mixture of experts is, independent of how many ranks it runs on."""

from __future__ import annotations

from dataclasses import dataclass, field

from megackpt.errors import DeclarationError
from megackpt.training.parallel import Capacity, ParallelLayout, RoutingOptions, SwiGLU


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
