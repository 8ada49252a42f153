"""DeepSeek-V3 and Qwen3-Next of the real Megatron-Core on CPU ranks, as a Hugging Face config describes them.

Every function runs in a worker of a RankPool. A model has Megatron-Core's layers without kernels
(`is_fused=False`), or those that it has with Transformer Engine: Megatron-Core's own spec of them, in which
stand-ins take the place of Transformer Engine's classes. They have the names of its parameters and compute
in torch. The gated delta net runs with its recurrence in torch (`deterministic_mode`), and a stand-in for the
one function of `fla` that it then needs.
"""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megackpt
from megackpt.mapping.flatten import flatten_state
from megackpt.maps import checkpoint_map, family
from tests.contrib.megatron import megatron_world as world
from tests.contrib.megatron.megatron_world import Layout

FLA = (
    "fla",
    "fla.modules",
    "fla.modules.convolution",
    "fla.modules.l2norm",
    "fla.ops",
    "fla.ops.gated_delta_rule",
)
"""Modules of kernels for gated delta nets, which Megatron-Core imports. They need a GPU."""

Fields = dict[str, Any]
Logits = list[Tensor]
"""Logits `[b, s, vocab]` of the next token, and of each further one, of one of the last stage's ranks."""


def build(fields: Fields, layout: Layout, *, seed: int, is_fused: bool, further: int) -> Any:
    """Return this rank's part of a GPTModel with random weights; collective.

    Args:
        fields: of its `config.json`.
        layout: the ranks.
        seed: of its weights.
        is_fused: whether norms are parts of the projections after them, as with Transformer Engine.
        further: number of layers for further tokens.
    """
    world.without_gpu()
    torch.compiler.set_stance("force_eager")  # what Megatron-Core compiles would be slower here
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.destroy_model_parallel()
    gc.collect()
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, expert_model_parallel_size=layout.ep)
    initialize_rng_tracker(inference_rng_tracker=True)
    torch.manual_seed(seed * 1000 + dist.get_rank())
    is_latent = fields["model_type"] == "deepseek_v3"
    config = (_latent_config if is_latent else _delta_net_config)(fields, layout, further)
    with ExitStack() as stack:
        _replace_layers(stack)
        if is_latent:
            spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, is_fused, normalization="RMSNorm")
        else:
            spec = _delta_net_spec(config, stack)
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, is_fused) if further else None
        model: Any = GPTModel(
            config,
            spec,
            vocab_size=fields["vocab_size"],
            max_sequence_length=world.SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=fields["rope_parameters"]["rope_theta"],
            rotary_percent=fields["rope_parameters"].get("partial_rotary_factor", 1.0),
            share_embeddings_and_output_weights=fields["tie_word_embeddings"],
            parallel_output=False,
            mtp_block_spec=mtp,
        )
    return model.eval()


def _common_options(fields: Fields, layout: Layout, further: int) -> dict[str, Any]:
    return {
        "num_layers": fields["num_hidden_layers"],
        "mtp_num_layers": further or None,
        "hidden_size": fields["hidden_size"],
        "num_attention_heads": fields["num_attention_heads"],
        "ffn_hidden_size": fields["intermediate_size"],
        "layernorm_epsilon": fields["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "use_cpu_initialization": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "pipeline_dtype": torch.float32,
        "moe_router_topk": fields["num_experts_per_tok"],
        "moe_ffn_hidden_size": fields["moe_intermediate_size"],
        "moe_token_dispatcher_type": "allgather",
        "moe_aux_loss_coeff": 0.0,
    }


def _latent_config(fields: Fields, layout: Layout, further: int) -> Any:
    from megatron.core.transformer import MLATransformerConfig

    rope, dense = fields["rope_parameters"], fields["first_k_dense_replace"]
    yarn = {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.get("factor"),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        "beta_fast": rope.get("beta_fast"),
        "beta_slow": rope.get("beta_slow"),
        "mscale": rope.get("mscale"),
        "mscale_all_dim": rope.get("mscale_all_dim"),
    }
    plain = {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    layers = [int(layer >= dense) for layer in range(fields["num_hidden_layers"])]
    return MLATransformerConfig(
        **_common_options(fields, layout, further),
        **(yarn if rope["rope_type"] == "yarn" else plain),
        q_lora_rank=fields["q_lora_rank"],
        kv_lora_rank=fields["kv_lora_rank"],
        qk_head_dim=fields["qk_nope_head_dim"],
        qk_pos_emb_head_dim=fields["qk_rope_head_dim"],
        v_head_dim=fields["v_head_dim"],
        rotary_base=rope["rope_theta"],
        num_moe_experts=fields["n_routed_experts"],
        moe_layer_freq=layers if dense else 1,
        moe_shared_expert_intermediate_size=fields["n_shared_experts"] * fields["moe_intermediate_size"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=fields["n_group"] if fields["n_group"] > 1 else None,
        moe_router_group_topk=fields["topk_group"] if fields["n_group"] > 1 else None,
        moe_router_topk_scaling_factor=fields["routed_scaling_factor"],
    )


def _delta_net_config(fields: Fields, layout: Layout, further: int) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **_common_options(fields, layout, further),
        num_query_groups=fields["num_key_value_heads"],
        kv_channels=fields["head_dim"],
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        deterministic_mode=True,  # the recurrence of a gated delta net is in torch
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(kind == "linear_attention") for kind in fields["layer_types"]],
        linear_conv_kernel_dim=fields["linear_conv_kernel_dim"],
        linear_num_key_heads=fields["linear_num_key_heads"],
        linear_num_value_heads=fields["linear_num_value_heads"],
        linear_key_head_dim=fields["linear_key_head_dim"],
        linear_value_head_dim=fields["linear_value_head_dim"],
        num_moe_experts=fields["num_experts"],
        moe_shared_expert_intermediate_size=fields["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
    )


def _delta_net_spec(config: Any, stack: ExitStack) -> Any:
    stubs = {name: ModuleType(name) for name in FLA}
    vars(stubs["fla.modules.convolution"])["causal_conv1d"] = None
    vars(stubs["fla.modules.l2norm"])["l2norm"] = _normalised
    vars(stubs["fla.ops.gated_delta_rule"])["chunk_gated_delta_rule"] = None
    stack.enter_context(mock.patch.dict(sys.modules, stubs))
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


def tokens_of(fields: Fields) -> Tensor:
    """Return the tokens `[b, s]` of which logits are computed."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, fields["vocab_size"], (world.BATCH, world.SEQUENCE), generator=generator)


@torch.no_grad()
def logits_of(model: Any, fields: Fields) -> Logits | None:
    """Return the logits on ranks of the last stage, None on others; collective."""
    from megatron.core import parallel_state

    tokens = tokens_of(fields)
    positions = torch.arange(world.SEQUENCE).expand(tokens.shape)
    mask = torch.triu(torch.ones(1, 1, world.SEQUENCE, world.SEQUENCE), 1).bool()
    if not parallel_state.is_pipeline_first_stage():
        received = torch.empty(world.SEQUENCE, world.BATCH, fields["hidden_size"])
        dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(received)
    if not parallel_state.is_pipeline_last_stage():
        hidden = model(tokens, positions, mask)
        dist.send(hidden.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    logits: Logits = []
    # Logits of further tokens become a loss inside of the model, and are not returned.
    hook = model.output_layer.register_forward_hook(
        lambda module, inputs, output: logits.append(output[0].transpose(0, 1).clone())
    )
    model(tokens, positions, mask, labels=tokens.roll(-1, 1))
    hook.remove()
    return [logits[-1], *logits[:-1]]


def save(fields: Fields, layout: Layout, path: str, is_fused: bool, further: int) -> Logits | None:
    """Build, fill from the oracle, save with Megatron-Core itself; return the logits on the last stage."""
    model = build(fields, layout, seed=1, is_fused=is_fused, further=further)
    world.fill(declared(model))
    world.save_genuinely(declared(model), path)
    return logits_of(model, fields)


def load(
    fields: Fields, layout: Layout, folder: str, is_fused: bool, further: int, name: str
) -> Logits | None:
    """Build, load a Hugging Face folder by the map of a family; return the logits on the last stage."""
    model = build(fields, layout, seed=2, is_fused=is_fused, further=further)
    for value in model.state_dict().values():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.fill_(float("nan"))  # whatever is not loaded shows
    state = declared(model)
    flat = flatten_state(state, rank=dist.get_rank(), ranks=dist.get_world_size())
    keys: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(keys, {tensor.key for tensor in flat.tensors})
    made = checkpoint_map(family(name), fields, set().union(*keys))
    weights = {key: entity for key, entity in state.items() if not key.endswith("_extra_state")}
    model.load_state_dict(megackpt.load(weights, folder, maps=made), strict=False)
    return logits_of(model, fields)


def declared(model: Any) -> dict[str, Any]:
    """Return the sharded state dict of a model of Megatron-Core."""
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    state: dict[str, Any] = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))
    return state
