"""The formats `zarr`: version 3 (zarr v3 with shards), and version 1 (Megatron-Core's zarr v2), only read."""
