"""Real mixers and models of Megatron-Core declare the arrays that ours do, or that our maps name.

Its Mamba mixer and gated delta net are compared with ours, rank by rank; its hybrid model and its T5, in
layers without kernels, with the maps of Nemotron-H and mT5. Kernels (`mamba_ssm`, `fla`) and `einops` are
empty modules, and attention without a kernel takes no bias of relative positions: nothing runs as a whole.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megackpt.maps import checkpoint_map, family_of, has_megatron_keys, megatron_map
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import GatedDeltaNet, MambaMixer, MambaSizes, ParallelGroups, ParallelLayout
from tests.contrib.megatron import megatron_world as world
from tests.contrib.megatron.megatron_stand_ins import empty_modules
from tests.contrib.megatron.megatron_world import Layout
from tests.support.effort import with_all
from tests.support.optimizers import tensors_of
from tests.support.states import assembled, random_arrays

HIDDEN = 12
SIZES = MambaSizes(num_heads=4, head_dim=6, state_size=5, num_groups=2)
Boxes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Global shape, offset and local shape by key."""

DELTA_NET = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 5}
KERNELS = (
    "einops",
    "fla",
    "mamba_ssm",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
)
"""Modules from which Megatron-Core imports functions, and which need a GPU or are not installed."""


class _Norm(nn.Module):
    """Stands for the fused norm of `mamba_ssm`, which is the base class of Megatron-Core's."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def _megatron_modules(layout: Layout) -> tuple[ModuleType, ModuleType]:
    """Make Megatron-Core ready for this rank; return its modules of both mixers. Collective."""
    world.start(layout, seed=0)
    with empty_modules(*KERNELS):
        importlib.import_module("mamba_ssm.ops.triton.layernorm_gated").RMSNorm = _Norm
        from megatron.core.ssm import gated_delta_net, mamba_mixer
    return mamba_mixer, gated_delta_net


def _real_mixers(layout: Layout) -> tuple[nn.Module, nn.Module]:
    """Return this rank's Mamba mixer and gated delta net of Megatron-Core. Collective."""
    mamba_mixer, gated_delta_net = _megatron_modules(layout)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        mamba_num_heads=SIZES.num_heads,
        mamba_head_dim=SIZES.head_dim,
        mamba_state_dim=SIZES.state_size,
        mamba_num_groups=SIZES.num_groups,
        linear_conv_kernel_dim=4,
        **{f"linear_{name}": size for name, size in DELTA_NET.items()},
        **world.options_of(layout),
    )
    linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    mixer: nn.Module = mamba_mixer.MambaMixer(
        config, mamba_mixer.MambaMixerSubmodules(**linear), HIDDEN, pg_collection=groups
    )
    submodules = gated_delta_net.GatedDeltaNetSubmodules(**linear, out_norm=WrappedTorchNorm)
    delta_net: nn.Module = gated_delta_net.GatedDeltaNet(config, submodules, 1, pg_collection=groups)
    return mixer, delta_net


def _boxes(tensors: list[Any]) -> Boxes:
    return {t.key: (tuple(t.global_shape), tuple(t.global_offset), tuple(t.local_shape)) for t in tensors}


def _tensors_of(state: Any) -> list[Any]:
    """Return the tensors of a state dict of Megatron-Core; those that it cuts one by one."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(state)
    return [entity for entity in nested_values(state) if isinstance(entity, ShardedTensor)]


def _declared(tp: int) -> tuple[Boxes, Boxes]:
    """Return what this rank of Megatron-Core's mixers and of ours has."""
    theirs = []
    for real, prefix in zip(_real_mixers(Layout(tp=tp)), ("mixer.", "delta_net."), strict=True):
        theirs += _tensors_of(real.sharded_state_dict(prefix))
    groups = ParallelGroups.offline(ParallelLayout(tp=tp), dist.get_rank())
    ours = list(tensors_of(MambaMixer(HIDDEN, SIZES, groups).sharded_state_dict("mixer.")))
    ours += tensors_of(GatedDeltaNet(HIDDEN, **DELTA_NET, groups=groups).sharded_state_dict("delta_net."))
    return _boxes(theirs), _boxes(ours)


@with_all("it imports Megatron-Core in two processes; tests of maps compare the names")
def test_the_mixers_declare_what_those_of_megatron_core_do(core_ranks: RankPool) -> None:
    ranks = core_ranks.run(_declared, 2, 2)
    for theirs, ours in ranks:
        assert theirs == ours
        assert {"mixer.in_proj.weight.dt", "delta_net.in_proj.weight.beta"} < ours.keys()
    assert ranks[0] != ranks[1]


HYBRID = {
    "model_type": "nemotron_h",
    "vocab_size": 32,
    "hidden_size": 14,
    "hybrid_override_pattern": "M*-EM",
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "n_groups": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 10,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 12,
}


def _real_hybrid() -> Any:
    """Return a whole model of Megatron-Core with the layers of HYBRID, of its layers without kernels."""
    mamba_mixer, _ = _megatron_modules(Layout())
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm import mamba_block, mamba_layer, mlp_layer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig, transformer_layer
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_block.TENorm = WrappedTorchNorm
    mixer = ModuleSpec(
        mamba_mixer.MambaMixer,
        submodules=mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    parts, add = transformer_layer.TransformerLayerSubmodules, get_bias_dropout_add
    dense = parts(pre_mlp_layernorm=WrappedTorchNorm, mlp=get_mlp_module_spec(use_te=False), mlp_bda=add)
    moe = parts(
        pre_mlp_layernorm=WrappedTorchNorm, mlp=get_moe_module_spec(use_te=False, num_experts=4), mlp_bda=add
    )
    stack = mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            mamba_layer.MambaLayer,
            submodules=mamba_layer.MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=add),
        ),
        attention_layer=ModuleSpec(
            transformer_layer.TransformerLayer,
            submodules=parts(input_layernorm=WrappedTorchNorm, self_attention=attention, self_attn_bda=add),
        ),
        mlp_layer=ModuleSpec(mlp_layer.MLPLayer, submodules=dense),
        moe_layer=ModuleSpec(transformer_layer.TransformerLayer, submodules=moe),
    )
    config = TransformerConfig(
        num_layers=5,
        hidden_size=14,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=6,
        ffn_hidden_size=10,
        normalization="RMSNorm",
        add_bias_linear=False,
        mamba_num_heads=4,
        mamba_head_dim=6,
        mamba_state_dim=5,
        mamba_num_groups=2,
        num_moe_experts=4,
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=12,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        **world.options_of(Layout()),
    )
    return MambaModel(
        config,
        ModuleSpec(mamba_block.MambaStack, submodules=stack),
        vocab_size=32,
        max_sequence_length=8,
        hybrid_override_pattern=HYBRID["hybrid_override_pattern"],
    )


T5 = {
    "model_type": "mt5",
    "vocab_size": 32,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 10,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "feed_forward_proj": "gated-gelu",
}


def _real_t5() -> Any:
    """Return a whole model of Megatron-Core with the layers of T5."""
    world.start(Layout(), seed=0)
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    def config(layers: int) -> TransformerConfig:
        return TransformerConfig(
            num_layers=layers,
            hidden_size=12,
            num_attention_heads=4,
            kv_channels=5,
            ffn_hidden_size=10,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.gelu,
            normalization="RMSNorm",
            add_bias_linear=False,
            softmax_scale=1.0,  # the model of transformers does not divide scores
            **world.options_of(Layout()),
        )

    encoder, decoder = (
        TransformerBlockSubmodules([spec] * layers, layer_norm=WrappedTorchNorm)
        for spec, layers in ((encoder_model_with_local_spec(), 3), (decoder_model_with_local_spec(), 2))
    )
    return T5Model(
        config(2),
        config(3),
        encoder,
        decoder,
        vocab_size=32,
        max_sequence_length=8,
        position_embedding_type="relative",
        relative_attention_num_buckets=8,
    )


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    model = _real_t5() if config["model_type"] == "mt5" else _real_hybrid()
    return {t.key: tuple(t.global_shape) for t in _tensors_of(model.sharded_state_dict())}


@with_all("it imports Megatron-Core in a process; tests of maps compare the names")
@pytest.mark.parametrize(
    ("config", "copied", "some"),
    [
        (HYBRID, {}, {"decoder.final_norm.weight", "decoder.layers.0.norm.weight"}),
        (T5, {"output_layer.weight": "lm_head.output_layer.weight"}, {"lm_head.output_layer.weight"}),
    ],
    ids=["nemotron_h", "mt5"],
)
def test_a_whole_model_declares_what_the_map_names(
    config: dict[str, Any], copied: dict[str, str], some: set[str], core_ranks: RankPool
) -> None:
    (actual,) = core_ranks.run(_shapes, 1, config)
    assert has_megatron_keys(actual)
    family = family_of(config)
    made = megatron_map(family.region_map(config).left, family.rules(config, ()).sizes, list(actual))
    copies = {key: actual[source] for key, source in copied.items()}
    assert actual == {key: array.stored for key, array in made.right.items()} | copies
    assert set(checkpoint_map(family, config, list(actual)).left) == actual.keys() - copies.keys()
    assert some < actual.keys()


def _keys_and_values(weight: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
    """Return the keys and values that Megatron-Core's cross attention has, with this joined weight."""
    attention = _real_t5().decoder.layers[0].cross_attention
    with torch.no_grad():
        attention.linear_kv.weight.copy_(weight)
        _, key, value = attention.get_query_key_value_tensors(states[:1], states)
    return [key, value]


@with_all("it imports Megatron-Core in a process; test_megatron_map has the order")
def test_keys_and_values_of_cross_attention_are_where_the_map_has_them(core_ranks: RankPool) -> None:
    family = family_of(T5)
    hub = family.region_map(T5)
    ours = assembled(hub, random_arrays(hub, 0))
    made = megatron_map(hub.left, family.rules(T5, ()).sizes)
    joined = assembled(made.inverse(), ours)["decoder.layers.cross_attention.linear_kv.weight"][0]
    states = torch.randn(6, 2, 12, generator=torch.Generator().manual_seed(0))
    (actual,) = core_ranks.run(_keys_and_values, 1, joined, states)
    for tensor, component in zip(actual, "kv", strict=True):
        expected = states @ ours[f"decoder.layers.0.cross_attention.linear_kv.weight.{component}"].T
        # Sums of 12 products each, in another order.
        torch.testing.assert_close(tensor.flatten(2), expected, rtol=1e-5, atol=1e-5)
