"""Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.tensorstore`, for the names."""

from megackpt.compat.megatron.refusal import refused

_ZARR = {
    "because": "this version does not read zarr checkpoints.",
    "instead": "Convert them with Megatron-Core 0.15 or older; reading them will live in "
    "megackpt.formats.zarr.",
}
TensorStoreLoadShardedStrategy = refused("TensorStoreLoadShardedStrategy", **_ZARR)
merge_global_slice_with_shape = refused("merge_global_slice_with_shape", **_ZARR)
open_ts_array = refused("open_ts_array", **_ZARR)
register_default_tensorstore_strategies = refused("register_default_tensorstore_strategies", **_ZARR)
