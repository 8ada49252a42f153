"""Layers that know their sharding, over tensor, sequence, context, expert, pipeline and data parallelism."""

from megackpt.parallel.adapters import (
    adapter_metadata,
    adapter_parameters,
    adapter_state,
    add_adapters,
    base_state,
    merge_adapter,
    reset_magnitudes,
    set_active_adapters,
)
from megackpt.parallel.attention import (
    CrossAttention,
    LatentAttention,
    LatentSizes,
    join_heads,
    split_heads,
)
from megackpt.parallel.attributes import (
    ParameterFlag,
    RowRange,
    copied_rows,
    is_marked,
    mark,
    mark_copied_rows,
)
from megackpt.parallel.causal_conv import CausalConv1d
from megackpt.parallel.chunks import ModelChunks
from megackpt.parallel.collectives import (
    all_reduce,
    collect_rows,
    collect_sequence,
    copy_to,
    copy_to_neighbours,
    exchange_rows,
    gather_from,
    gather_rows,
    gather_sequence,
    reduce_from,
    reduce_scatter_rows,
    reduce_scatter_sequence,
    scatter_rows,
    scatter_sequence,
    scatter_to,
)
from megackpt.parallel.context import (
    AttentionPart,
    attention_parts,
    causal_attention,
    context_positions,
    context_share,
    gather_context,
    gather_keys_and_values,
    heads_to_tokens,
    join_context,
    own_heads,
    tokens_to_heads,
)
from megackpt.parallel.delta_net import GatedDeltaNet, gated_delta_rule
from megackpt.parallel.dispatch import Capacity, TokenDispatcher
from megackpt.parallel.embedding import (
    VocabParallelEmbedding,
    VocabParallelOutput,
    padded_vocab_size,
    vocab_parallel_cross_entropy,
)
from megackpt.parallel.expert_stack import ExpertStack
from megackpt.parallel.experts import (
    GatedExperts,
    GroupedColumnLinear,
    GroupedReplicatedLinear,
    GroupedRowLinear,
    PlainExperts,
    divide_over_ep,
)
from megackpt.parallel.foreign_modules import ForeignDeclaration, Metadata, register_package
from megackpt.parallel.groups import Axis, ParallelGroups
from megackpt.parallel.layout import Coordinates, ExpertCoordinates, ParallelLayout
from megackpt.parallel.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    divide_over_tp,
)
from megackpt.parallel.lora import LoRA
from megackpt.parallel.lora_config import LoRAConfig
from megackpt.parallel.mamba import GatedGroupNorm, MambaMixer, MambaSizes
from megackpt.parallel.mixin import (
    ShardedModule,
    declare_module,
    declare_tensor,
    second_copy,
    sharded_state_dict,
)
from megackpt.parallel.moe import Experts, MixtureOfExperts
from megackpt.parallel.mtp import MTPLayer, mean_over_tokens_ahead, tokens_ahead
from megackpt.parallel.norm import LayerNorm, RMSNorm
from megackpt.parallel.pipeline import (
    MicroBatch,
    PipelineStage,
    exchange,
    forward_backward,
    forward_only,
    share_losses,
)
from megackpt.parallel.rng import ParallelDropout, ParallelRng, dropout, stable_seed
from megackpt.parallel.router import (
    Router,
    mean_auxiliary_losses,
    set_auxiliary_loss_scale,
    update_expert_bias,
)
from megackpt.parallel.routing import Routing, RoutingOptions
from megackpt.parallel.schedule import (
    Action,
    Backward,
    Forward,
    Transfer,
    plan_1f1b,
    plan_forward,
    plan_interleaved,
)
from megackpt.parallel.selective_scan import selective_scan
from megackpt.parallel.stack import LayerStack
from megackpt.parallel.stages import StageTable
from megackpt.parallel.swiglu import SwiGLU
from megackpt.parallel.tp_sharding import Declarations, TpSharding

__all__ = [
    "Action",
    "AttentionPart",
    "Axis",
    "Backward",
    "Capacity",
    "CausalConv1d",
    "ColumnParallelLinear",
    "Coordinates",
    "CrossAttention",
    "Declarations",
    "ExpertCoordinates",
    "ExpertStack",
    "Experts",
    "ForeignDeclaration",
    "Forward",
    "GatedDeltaNet",
    "GatedExperts",
    "GatedGroupNorm",
    "GroupedColumnLinear",
    "GroupedReplicatedLinear",
    "GroupedRowLinear",
    "LatentAttention",
    "LatentSizes",
    "LayerNorm",
    "LayerStack",
    "LoRA",
    "LoRAConfig",
    "MTPLayer",
    "MambaMixer",
    "MambaSizes",
    "Metadata",
    "MicroBatch",
    "MixtureOfExperts",
    "ModelChunks",
    "ParallelDropout",
    "ParallelGroups",
    "ParallelLayout",
    "ParallelRng",
    "ParameterFlag",
    "PipelineStage",
    "PlainExperts",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "Router",
    "Routing",
    "RoutingOptions",
    "RowParallelLinear",
    "RowRange",
    "ShardedModule",
    "StageTable",
    "SwiGLU",
    "TokenDispatcher",
    "TpSharding",
    "Transfer",
    "VocabParallelEmbedding",
    "VocabParallelOutput",
    "adapter_metadata",
    "adapter_parameters",
    "adapter_state",
    "add_adapters",
    "all_reduce",
    "attention_parts",
    "base_state",
    "causal_attention",
    "collect_rows",
    "collect_sequence",
    "context_positions",
    "context_share",
    "copied_rows",
    "copy_to",
    "copy_to_neighbours",
    "declare_module",
    "declare_tensor",
    "divide_over_ep",
    "divide_over_tp",
    "dropout",
    "exchange",
    "exchange_rows",
    "forward_backward",
    "forward_only",
    "gated_delta_rule",
    "gather_context",
    "gather_from",
    "gather_keys_and_values",
    "gather_rows",
    "gather_sequence",
    "heads_to_tokens",
    "is_marked",
    "join_context",
    "join_heads",
    "mark",
    "mark_copied_rows",
    "mean_auxiliary_losses",
    "mean_over_tokens_ahead",
    "merge_adapter",
    "own_heads",
    "padded_vocab_size",
    "plan_1f1b",
    "plan_forward",
    "plan_interleaved",
    "reduce_from",
    "reduce_scatter_rows",
    "reduce_scatter_sequence",
    "register_package",
    "reset_magnitudes",
    "scatter_rows",
    "scatter_sequence",
    "scatter_to",
    "second_copy",
    "selective_scan",
    "set_active_adapters",
    "set_auxiliary_loss_scale",
    "sharded_state_dict",
    "share_losses",
    "split_heads",
    "stable_seed",
    "tokens_ahead",
    "tokens_to_heads",
    "update_expert_bias",
    "vocab_parallel_cross_entropy",
]
