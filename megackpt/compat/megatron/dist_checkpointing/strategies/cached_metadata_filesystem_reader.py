"""Source: Megatron-Core `dist_checkpointing.strategies.cached_metadata_filesystem_reader`, for the name."""

from megackpt.compat.megatron.refusal import refused

CachedMetadataFileSystemReader = refused(
    "CachedMetadataFileSystemReader",
    because="it reads .metadata, a pickle; no path of this library unpickles.",
    instead="Use load() or load_sharded_metadata(), which read only the index rows they need.",
)
