"""Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.zarr`, for the names."""

from megackpt.compat.megatron.refusal import refused

_ZARR = {
    "because": "this version neither writes nor reads zarr checkpoints.",
    "instead": "Save in the native format; zarr will live in megackpt.formats.zarr.",
}
ZarrLoadShardedStrategy = refused("ZarrLoadShardedStrategy", **_ZARR)
ZarrSaveShardedStrategy = refused("ZarrSaveShardedStrategy", **_ZARR)
flatten_range = refused("flatten_range", **_ZARR)
load_zarr_based_sharded_metadata = refused("load_zarr_based_sharded_metadata", **_ZARR)
pad_to_expected_shape = refused("pad_to_expected_shape", **_ZARR)
postprocess_numpy_array = refused("postprocess_numpy_array", **_ZARR)
register_default_zarr_strategies = refused("register_default_zarr_strategies", **_ZARR)
