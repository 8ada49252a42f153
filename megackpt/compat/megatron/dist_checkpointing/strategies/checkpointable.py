"""Source: Megatron-Core `dist_checkpointing.strategies.checkpointable`, for the names."""

from megackpt.compat.megatron.refusal import refused

_PLUMBING = {
    "because": "it hands an entity to torch.distributed.checkpoint, and entities are never handed there.",
    "instead": "Pass the ShardedTensor itself to save() or load(); uneven grids work with "
    "axis_fragmentations=None.",
}
CheckpointableShardedTensor = refused("CheckpointableShardedTensor", **_PLUMBING)
LocalShardsContainer = refused("LocalShardsContainer", **_PLUMBING)
