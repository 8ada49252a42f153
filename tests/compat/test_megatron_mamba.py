"""Megatron-Core's Mamba mixer declares the arrays that ours does, rank by rank.

The mixer is the real one, its kernels (`mamba_ssm`) and `einops` are empty modules: it is built and declares
its state, and does not run.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megackpt.parallel import MambaMixer, MambaSizes, ParallelGroups, ParallelLayout
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

KERNELS = {
    "einops": ("rearrange", "repeat"),
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
"""Modules that need a GPU or are not installed, and the functions that the mixer imports."""


class _Norm(nn.Module):
    """Stands for the fused norm of `mamba_ssm`, which is the base class of Megatron-Core's."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def _real_mixer(tp: int) -> nn.Module:
    """Return this rank's mixer of Megatron-Core. Collective."""
    megatron_world.without_gpu()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp)
    initialize_rng_tracker(inference_rng_tracker=True)
    stubs = {name: ModuleType(name) for name in KERNELS}
    vars(stubs["mamba_ssm.ops.triton.layernorm_gated"])["RMSNorm"] = _Norm
    for name, functions in KERNELS.items():
        vars(stubs[name]).update(dict.fromkeys(functions))
    sys.modules.update(stubs)
    try:
        from megatron.core.ssm import mamba_mixer
    finally:
        for name in stubs:
            del sys.modules[name]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        mamba_num_heads=SIZES.num_heads,
        mamba_head_dim=SIZES.head_dim,
        mamba_state_dim=SIZES.state_size,
        mamba_num_groups=SIZES.num_groups,
        tensor_model_parallel_size=tp,
    )
    submodules = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    mixer: nn.Module = mamba_mixer.MambaMixer(config, submodules, HIDDEN, pg_collection=groups)
    return mixer


def _boxes(tensors: list[Any]) -> Boxes:
    return {t.key: (tuple(t.global_shape), tuple(t.global_offset), tuple(t.local_shape)) for t in tensors}


def _declared(tp: int) -> tuple[Boxes, Boxes]:
    """Return what this rank of Megatron-Core's mixer and of ours has."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor as TheirTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    theirs = []
    for entity in _real_mixer(tp).sharded_state_dict("mixer.").values():
        if isinstance(entity, ShardedTensorFactory):
            theirs += entity.build()
        elif isinstance(entity, TheirTensor):
            theirs.append(entity)
    groups = ParallelGroups.offline(ParallelLayout(tp=tp), dist.get_rank())
    ours = MambaMixer(HIDDEN, SIZES, groups)
    return _boxes(theirs), _boxes(list(tensors_of(ours.sharded_state_dict("mixer."))))


@only_thorough("it imports Megatron-Core in two processes; test_mamba_maps compares the names")
def test_the_mixer_declares_what_that_of_megatron_core_does(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(_declared, 2, 2)
    for theirs, ours in ranks:
        assert theirs == ours
        assert "mixer.in_proj.weight.dt" in ours
    assert ranks[0] != ranks[1]
