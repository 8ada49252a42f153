"""Megatron-Core's Mamba mixer and gated delta net declare the arrays that ours do, rank by rank.

They are the real ones, their kernels (`mamba_ssm`, `fla`) and `einops` are empty modules: they are built and
declare their state, and do not run.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megackpt.parallel import GatedDeltaNet, MambaMixer, MambaSizes, ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.compat import megatron_world
from tests.effort import only_thorough
from tests.optim_world import tensors_of

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.multiprocess

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


def _declared(tp: int) -> tuple[Boxes, Boxes]:
    """Return what this rank of Megatron-Core's mixers and of ours has."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor as TheirTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    theirs = []
    for real, prefix in zip(_real_mixers(tp), ("mixer.", "delta_net."), strict=True):
        for entity in real.sharded_state_dict(prefix).values():
            if isinstance(entity, ShardedTensorFactory):
                theirs += entity.build()
            elif isinstance(entity, TheirTensor):
                theirs.append(entity)
    groups = ParallelGroups.offline(ParallelLayout(tp=tp), dist.get_rank())
    ours = list(tensors_of(MambaMixer(HIDDEN, SIZES, groups).sharded_state_dict("mixer.")))
    ours += tensors_of(GatedDeltaNet(HIDDEN, **DELTA_NET, groups=groups).sharded_state_dict("delta_net."))
    return _boxes(theirs), _boxes(ours)


@only_thorough("it imports Megatron-Core in two processes; tests of maps compare the names")
def test_the_mixers_declare_what_those_of_megatron_core_do(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(_declared, 2, 2)
    for theirs, ours in ranks:
        assert theirs == ours
        assert {"mixer.in_proj.weight.dt", "delta_net.in_proj.weight.beta"} < ours.keys()
    assert ranks[0] != ranks[1]
