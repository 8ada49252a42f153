"""Megatron-Core's Mamba mixer and gated delta net declare the arrays that ours do, rank by rank.

Its hybrid model declares those that the map of Nemotron-H names. All are the real ones. Their kernels
(`mamba_ssm`, `fla`) and `einops` are empty modules: they are built and declare their state, and do not run.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megackpt.maps import family_of, has_megatron_keys, megatron_map
from megackpt.parallel import GatedDeltaNet, MambaMixer, MambaSizes, ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron import megatron_world
from tests.support.effort import with_all
from tests.support.optimizers import tensors_of

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
HIDDEN = 12
SIZES = MambaSizes(num_heads=4, head_dim=6, state_size=5, num_groups=2)
Boxes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Global shape, offset and local shape by key."""

DELTA_NET = {
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_head_dim": 6,
    "value_head_dim": 5,
}

KERNELS = {
    "einops": ("rearrange", "repeat"),
    "fla": (),
    "fla.modules": (),
    "fla.modules.l2norm": ("l2norm",),
    "fla.ops": (),
    "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule",),
    "mamba_ssm": (),
    "mamba_ssm.ops": (),
    "mamba_ssm.ops.triton": (),
    "mamba_ssm.ops.triton.layernorm_gated": (),
    "mamba_ssm.ops.triton.selective_state_update": ("selective_state_update",),
    "mamba_ssm.ops.triton.ssd_combined": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": (
        "tensor_get_slice_after",
        "tensor_masked_update",
        "tensor_merge",
    ),
}
"""Modules that need a GPU or are not installed, and the functions that Megatron-Core imports."""


class _Norm(nn.Module):
    """Stands for the fused norm of `mamba_ssm`, which is the base class of Megatron-Core's."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def _megatron_modules(tp: int) -> tuple[ModuleType, ModuleType]:
    """Make Megatron-Core ready for this rank; return its modules of both mixers. Collective."""
    megatron_world.without_gpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp)
    initialize_rng_tracker(inference_rng_tracker=True)
    stubs = {name: ModuleType(name) for name in KERNELS}
    vars(stubs["mamba_ssm.ops.triton.layernorm_gated"])["RMSNorm"] = _Norm
    for name, functions in KERNELS.items():
        vars(stubs[name]).update(dict.fromkeys(functions))
    sys.modules.update(stubs)
    try:
        from megatron.core.ssm import gated_delta_net, mamba_mixer
    finally:
        for name in stubs:
            del sys.modules[name]
    return mamba_mixer, gated_delta_net


def _real_mixers(tp: int) -> tuple[nn.Module, nn.Module]:
    """Return this rank's Mamba mixer and gated delta net of Megatron-Core. Collective."""
    mamba_mixer, gated_delta_net = _megatron_modules(tp)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        mamba_num_heads=SIZES.num_heads,
        mamba_head_dim=SIZES.head_dim,
        mamba_state_dim=SIZES.state_size,
        mamba_num_groups=SIZES.num_groups,
        linear_conv_kernel_dim=4,
        **{f"linear_{name}": size for name, size in DELTA_NET.items()},
        tensor_model_parallel_size=tp,
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
    from megatron.core.dist_checkpointing.mapping import ShardedTensor as TheirTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    tensors = []
    for entity in state.values():
        if isinstance(entity, ShardedTensorFactory):
            built = entity.build()
            tensors += built.values() if isinstance(built, dict) else built
        elif isinstance(entity, TheirTensor):
            tensors.append(entity)
    return tensors


def _declared(tp: int) -> tuple[Boxes, Boxes]:
    """Return what this rank of Megatron-Core's mixers and of ours has."""
    theirs = []
    for real, prefix in zip(_real_mixers(tp), ("mixer.", "delta_net."), strict=True):
        theirs += _tensors_of(real.sharded_state_dict(prefix))
    groups = ParallelGroups.offline(ParallelLayout(tp=tp), dist.get_rank())
    ours = list(tensors_of(MambaMixer(HIDDEN, SIZES, groups).sharded_state_dict("mixer.")))
    ours += tensors_of(GatedDeltaNet(HIDDEN, **DELTA_NET, groups=groups).sharded_state_dict("delta_net."))
    return _boxes(theirs), _boxes(ours)


@with_all("it imports Megatron-Core in two processes; tests of maps compare the names")
def test_the_mixers_declare_what_those_of_megatron_core_do(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(_declared, 2, 2)
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
    mamba_mixer, _ = _megatron_modules(1)
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
        use_cpu_initialization=True,
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
        moe_token_dispatcher_type="allgather",
    )
    return MambaModel(
        config,
        ModuleSpec(mamba_block.MambaStack, submodules=stack),
        vocab_size=32,
        max_sequence_length=8,
        hybrid_override_pattern=HYBRID["hybrid_override_pattern"],
    )


def _hybrid_shapes() -> dict[str, tuple[int, ...]]:
    return {t.key: tuple(t.global_shape) for t in _tensors_of(_real_hybrid().sharded_state_dict())}


@with_all("it imports Megatron-Core in a process; test_map_families has the names")
def test_a_whole_hybrid_model_declares_what_the_map_of_nemotron_h_names(rank_pool: RankPool) -> None:
    (actual,) = rank_pool.run(_hybrid_shapes, 1)
    assert has_megatron_keys(actual)
    family = family_of(HYBRID)
    made = megatron_map(family.region_map(HYBRID).left, family.rules(HYBRID, ()).sizes, list(actual))
    assert actual == {key: array.stored for key, array in made.right.items()}
    assert {"decoder.final_norm.weight", "decoder.layers.0.norm.weight"} < actual.keys()
