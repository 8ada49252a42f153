"""Layers that know their sharding, over tensor, sequence, context, expert, pipeline and data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megackpt.parallel.adapters import add_adapters
from megackpt.parallel.attention import CrossAttention, LatentAttention, LatentSizes
from megackpt.parallel.chunks import ModelChunks
from megackpt.parallel.context import causal_attention, context_positions, context_share
from megackpt.parallel.delta_net import GatedDeltaNet
from megackpt.parallel.dispatch import Capacity
from megackpt.parallel.embedding import (
    VocabParallelEmbedding,
    VocabParallelOutput,
    vocab_parallel_cross_entropy,
)
from megackpt.parallel.expert_stack import ExpertStack
from megackpt.parallel.experts import GatedExperts, PlainExperts
from megackpt.parallel.groups import Axis, ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from megackpt.parallel.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    divide_over_tp,
)
from megackpt.parallel.lora_config import LoRAConfig
from megackpt.parallel.mamba import MambaMixer, MambaSizes
from megackpt.parallel.mixin import ShardedModule, sharded_state_dict
from megackpt.parallel.moe import MixtureOfExperts
from megackpt.parallel.mtp import MTPLayer
from megackpt.parallel.norm import LayerNorm, RMSNorm
from megackpt.parallel.pipeline import MicroBatch, forward_backward, share_losses
from megackpt.parallel.rng import ParallelDropout, ParallelRng
from megackpt.parallel.router import Router, update_expert_bias
from megackpt.parallel.routing import RoutingOptions
from megackpt.parallel.stack import LayerStack
from megackpt.parallel.stages import StageTable
from megackpt.parallel.swiglu import SwiGLU
from megackpt.parallel.tp_sharding import TpSharding

__all__ = [
    "Axis",
    "Capacity",
    "ColumnParallelLinear",
    "CrossAttention",
    "ExpertStack",
    "GatedDeltaNet",
    "GatedExperts",
    "LatentAttention",
    "LatentSizes",
    "LayerNorm",
    "LayerStack",
    "LoRAConfig",
    "MTPLayer",
    "MambaMixer",
    "MambaSizes",
    "MicroBatch",
    "MixtureOfExperts",
    "ModelChunks",
    "ParallelDropout",
    "ParallelGroups",
    "ParallelLayout",
    "ParallelRng",
    "PlainExperts",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "Router",
    "RoutingOptions",
    "RowParallelLinear",
    "ShardedModule",
    "StageTable",
    "SwiGLU",
    "TpSharding",
    "VocabParallelEmbedding",
    "VocabParallelOutput",
    "add_adapters",
    "causal_attention",
    "context_positions",
    "context_share",
    "divide_over_tp",
    "forward_backward",
    "sharded_state_dict",
    "share_losses",
    "update_expert_bias",
    "vocab_parallel_cross_entropy",
]


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a name that has moved to the module that defines it."""
        from megackpt.moved_names import moved_name

        return moved_name(__name__, name)


def __dir__() -> list[str]:
    return list(__all__)
