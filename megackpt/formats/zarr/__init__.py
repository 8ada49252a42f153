"""The formats `zarr`: version 1 (zarr v2, as Megatron-Core wrote it) and version 3 (zarr v3 with shards)."""
