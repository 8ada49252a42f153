"""DeepSeek-V3 and Qwen3-Next of the real Megatron-Core on CPU ranks, as a Hugging Face config describes them.

Every function runs in a worker of a RankPool. A model has Megatron-Core's layers without kernels
(`is_fused=False`), or those that it has with Transformer Engine: Megatron-Core's own spec of them, in which
stand-ins take the place of Transformer Engine's classes. They have the names of its parameters and compute
in torch. The gated delta net runs with its recurrence in torch (`deterministic_mode`), and a stand-in for the
one function of `fla` that it then needs.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.maps import family
from tests.contrib.megatron import megatron_world as world
from tests.contrib.megatron.megatron_stand_ins import empty_modules
from tests.contrib.megatron.megatron_world import Layout
from tests.support.huggingface_models import RELATIVE, SCAN_RELATIVE

Fields = dict[str, Any]
Logits = list[Tensor]
"""Logits `[b, s, vocab]` of the next token, and of each further one, of one of the last stage's ranks."""


@dataclass(frozen=True)
class Case:
    """A model that is saved at one layout and loaded at another.

    Attributes:
        fields: of its config.json.
        is_fused: whether norms are parts of the projections after them, as with Transformer Engine.
        further: number of layers for further tokens.
        saved: layout of the model that is saved.
        loaded: layout of the model that loads the folder.
    """

    fields: Fields
    is_fused: bool
    further: int
    saved: Layout
    loaded: Layout

    @property
    def map(self) -> str:
        name: str = self.fields["model_type"]
        return f"{name}_mtp" if self.further else name

    @property
    def relative(self) -> float:
        return RELATIVE if self.fields["model_type"] == "deepseek_v3" else SCAN_RELATIVE


def build(case: Case, layout: Layout, *, seed: int) -> Any:
    """Return this rank's part of a GPTModel with random weights; collective."""
    torch.compiler.set_stance("force_eager")  # what Megatron-Core compiles would be slower here
    world.start(layout, seed)
    from megatron.core.models.gpt import gpt_layer_specs

    fields = case.fields
    is_latent = fields["model_type"] == "deepseek_v3"
    config = (_latent_config if is_latent else _delta_net_config)(case, layout)
    with ExitStack() as stack:
        _replace_layers(stack)
        if is_latent:
            spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, case.is_fused, normalization="RMSNorm")
        else:
            spec = _delta_net_spec(config, stack)
        return world.gpt_of(
            config,
            spec,
            position_embedding_type="rope",
            rotary_base=fields["rope_parameters"]["rope_theta"],
            rotary_percent=fields["rope_parameters"].get("partial_rotary_factor", 1.0),
            share_embeddings_and_output_weights=fields["tie_word_embeddings"],
            mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, case.is_fused)
            if case.further
            else None,
        )


def _common_options(case: Case, layout: Layout) -> dict[str, Any]:
    fields = case.fields
    return {
        "num_layers": fields["num_hidden_layers"],
        "mtp_num_layers": case.further or None,
        "hidden_size": fields["hidden_size"],
        "num_attention_heads": fields["num_attention_heads"],
        "ffn_hidden_size": fields["intermediate_size"],
        "layernorm_epsilon": fields["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "moe_router_topk": fields["num_experts_per_tok"],
        "moe_ffn_hidden_size": fields["moe_intermediate_size"],
        **world.options_of(layout),
    }


def _latent_config(case: Case, layout: Layout) -> Any:
    from megatron.core.transformer import MLATransformerConfig

    fields = case.fields
    rope, dense = dict(fields["rope_parameters"]), fields["first_k_dense_replace"]
    rotary_base, is_yarn = rope.pop("rope_theta"), rope["rope_type"] == "yarn"
    scaling = {"rotary_scaling_factor": rope.pop("factor", 1.0)}
    scaling |= rope if is_yarn else {"rope_type": "rope"}
    layers = [int(layer >= dense) for layer in range(fields["num_hidden_layers"])]
    return MLATransformerConfig(
        **_common_options(case, layout),
        **scaling,
        q_lora_rank=fields["q_lora_rank"],
        kv_lora_rank=fields["kv_lora_rank"],
        qk_head_dim=fields["qk_nope_head_dim"],
        qk_pos_emb_head_dim=fields["qk_rope_head_dim"],
        v_head_dim=fields["v_head_dim"],
        rotary_base=rotary_base,
        num_moe_experts=fields["n_routed_experts"],
        moe_layer_freq=layers if dense else 1,
        moe_shared_expert_intermediate_size=fields["n_shared_experts"] * fields["moe_intermediate_size"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=fields["n_group"] if fields["n_group"] > 1 else None,
        moe_router_group_topk=fields["topk_group"] if fields["n_group"] > 1 else None,
        moe_router_topk_scaling_factor=fields["routed_scaling_factor"],
    )


def _delta_net_config(case: Case, layout: Layout) -> Any:
    from megatron.core.transformer import TransformerConfig

    fields = case.fields
    return TransformerConfig(
        **_common_options(case, layout),
        num_query_groups=fields["num_key_value_heads"],
        kv_channels=fields["head_dim"],
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        deterministic_mode=True,  # the recurrence of a gated delta net is in torch
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(kind == "linear_attention") for kind in fields["layer_types"]],
        linear_conv_kernel_dim=fields["linear_conv_kernel_dim"],
        **{
            name: size
            for name, size in fields.items()
            if name.startswith(("linear_num", "linear_key", "linear_value"))
        },
        num_moe_experts=fields["num_experts"],
        moe_shared_expert_intermediate_size=fields["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
    )


def _delta_net_spec(config: Any, stack: ExitStack) -> Any:
    with empty_modules("fla"):  # kernels for gated delta nets, which need a GPU
        from megatron.core.ssm import gated_delta_net
    gated_delta_net.l2norm = _normalised
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    stack.enter_context(mock.patch.object(variants, "TESpecProvider", _providers()[1], create=True))
    return variants.get_transformer_block_with_experimental_attention_variant_spec(config)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class Norm(nn.Module):
    """Stands for Transformer Engine's RMSNorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.added, self.eps = float(config.layernorm_zero_centered_gamma), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight + self.added, self.eps)


class Duplicated(nn.Module):
    """Stands for Transformer Engine's Linear that every rank of tp has whole."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__()
        assert options["parallel_mode"] == "duplicated"
        self.weight = nn.Parameter(torch.empty(output_size, input_size))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


def _providers() -> tuple[Any, Any]:
    """Return what stands for Megatron-Core's choices of layers: its own, and Transformer Engine's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):  # type: ignore[misc]
        """Takes values of another size than keys, which Megatron-Core's own layer does not."""

        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
            super().__init__(*args, **options)
            if v_channels:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    class NormLinear(ColumnParallelLinear):  # type: ignore[misc]
        """Stands for Transformer Engine's LayerNormLinear."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.layer_norm_weight = nn.Parameter(torch.ones(input_size))
            self.added = float(config.layernorm_zero_centered_gamma)
            self.eps = config.layernorm_epsilon

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            x = F.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight + self.added, self.eps)
            return super().forward(x, *args, **kwargs)

    class Plain(LocalSpecProvider):  # type: ignore[misc]
        def core_attention(self) -> type:
            return Attention

    class Fused(Plain):
        def linear(self) -> type:
            return Duplicated

        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return NormLinear

        def layer_norm(self, **options: bool) -> type:
            return Norm

    return Plain, Fused


def _replace_layers(stack: ExitStack) -> None:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention

    plain, fused = _providers()
    for module, name, value in (
        (gpt_layer_specs, "LocalSpecProvider", plain),
        (gpt_layer_specs, "TESpecProvider", fused),
        (gpt_layer_specs, "TENorm", Norm),
        (multi_latent_attention, "TELinear", Duplicated),
    ):
        stack.enter_context(mock.patch.object(module, name, value, create=True))


def logits_of(model: Any) -> Logits | None:
    """Return the logits on ranks of the last stage, None on others; collective."""
    logits: Logits = []
    # Logits of further tokens become a loss inside of the model, and are not returned.
    if model.post_process:
        model.output_layer.register_forward_hook(
            lambda module, inputs, output: logits.append(output[0].transpose(0, 1).clone())
        )
    world.logits_of(model, labels=world.tokens().roll(-1, 1))
    return [logits[-1], *logits[:-1]] if logits else None


def save(case: Case, layout: Layout, path: str) -> Logits | None:
    """Build, fill from the oracle, save with Megatron-Core itself; return the logits on the last stage."""
    model = build(case, layout, seed=1)
    world.save_genuinely(declared(model), path)
    return logits_of(model)


def load(case: Case, layout: Layout, folder: str, name: str) -> Logits | None:
    """Build, load a Hugging Face folder by the map of a family; return the logits on the last stage."""
    model = build(case, layout, seed=2)
    world.load_weights(model, declared(model), folder, family(name), case.fields)
    return logits_of(model)


def declared(model: Any) -> dict[str, Any]:
    """Return the sharded state dict of a model of Megatron-Core."""
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    state: dict[str, Any] = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))
    return state
