"""Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.two_stage`, for the names."""

from megackpt.compat.megatron.refusal import refused

_TWO_STAGE = {
    "because": "this version does not read by one data-parallel replica and broadcast.",
    "instead": "Use load(), which gives the same tensors; reading once and sending on will live in "
    "megackpt.engine.",
}
TwoStageDataParallelLoadShardedStrategy = refused("TwoStageDataParallelLoadShardedStrategy", **_TWO_STAGE)
sharded_tensor_chunk_id = refused("sharded_tensor_chunk_id", **_TWO_STAGE)
timed = refused("timed", **_TWO_STAGE)
