"""Layers that know their sharding, over tensor, sequence, context, expert, pipeline and data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megackpt.ground.moved import moved_name
from megackpt.training.parallel.adapters import add_adapters
from megackpt.training.parallel.attention import CrossAttention, LatentAttention, LatentSizes
from megackpt.training.parallel.context import causal_attention, context_positions, context_share
from megackpt.training.parallel.delta_net import GatedDeltaNet
from megackpt.training.parallel.embedding import (
    VocabParallelEmbedding,
    VocabParallelOutput,
    vocab_parallel_cross_entropy,
)
from megackpt.training.parallel.experts import ExpertStack, GatedExperts, PlainExperts, SwiGLU
from megackpt.training.parallel.groups import Axis, ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from megackpt.training.parallel.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    divide_over_tp,
)
from megackpt.training.parallel.lora import LoRAConfig
from megackpt.training.parallel.mamba import MambaMixer, MambaSizes
from megackpt.training.parallel.mixin import ShardedModule, sharded_state_dict
from megackpt.training.parallel.moe import Capacity, MixtureOfExperts
from megackpt.training.parallel.mtp import MTPLayer
from megackpt.training.parallel.norm import LayerNorm, RMSNorm
from megackpt.training.parallel.pipeline import MicroBatch, ModelChunks, forward_backward, share_losses
from megackpt.training.parallel.rng import ParallelDropout, ParallelRng
from megackpt.training.parallel.router import Router, update_expert_bias
from megackpt.training.parallel.routing import RoutingOptions
from megackpt.training.parallel.stack import LayerStack
from megackpt.training.parallel.stages import StageTable
from megackpt.training.parallel.tp_sharding import TpSharding

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
        return moved_name(__name__, name)


def __dir__() -> list[str]:
    return list(__all__)
