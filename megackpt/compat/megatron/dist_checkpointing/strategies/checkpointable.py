"""Source: Megatron-Core `dist_checkpointing.strategies.checkpointable`, for the names."""

from megackpt.compat.megatron.unsupported import unsupported_name

_PLUMBING = {
    "because": "it hands an entity to torch.distributed.checkpoint, and entities are never handed there.",
    "instead": "Pass the ShardedTensor itself to save() or load(); uneven grids work with "
    "axis_fragmentations=None.",
}
CheckpointableShardedTensor = unsupported_name("CheckpointableShardedTensor", **_PLUMBING)
LocalShardsContainer = unsupported_name("LocalShardsContainer", **_PLUMBING)
