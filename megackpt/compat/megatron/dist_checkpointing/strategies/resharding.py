"""Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.resharding`, for the names."""

from megackpt.compat.megatron.refusal import refused

_RECTANGLES = {
    "because": "a flat shard is cut into rectangles, which any other layout can read.",
    "instead": "Declare the shard with flattened_range; nothing has to be reformulated.",
}
ReformulationRestoreMetadata = refused("ReformulationRestoreMetadata", **_RECTANGLES)
TensorReformulationMetadata = refused("TensorReformulationMetadata", **_RECTANGLES)
apply_nd_flattened_tensors_reformulation = refused("apply_nd_flattened_tensors_reformulation", **_RECTANGLES)
is_nd_flattened_tensor = refused("is_nd_flattened_tensor", **_RECTANGLES)
nd_flattened_tensor_reformulated_global_shape = refused(
    "nd_flattened_tensor_reformulated_global_shape", **_RECTANGLES
)
reformulate_single_nd_flattened_tensor = refused("reformulate_single_nd_flattened_tensor", **_RECTANGLES)
restore_nd_flattened_tensors_formulation = refused("restore_nd_flattened_tensors_formulation", **_RECTANGLES)
