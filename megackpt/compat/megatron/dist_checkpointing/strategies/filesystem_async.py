"""Source: Megatron-Core `dist_checkpointing.strategies.filesystem_async`, for the names."""

from typing import Any, TypeAlias

from megackpt.compat.megatron.refusal import refused

WriteBucket: TypeAlias = tuple[
    Any, str, tuple[list[Any], list[Any]]
]  # Megatron-Core's own, for annotations only
FileSystemWriterAsync = refused(
    "FileSystemWriterAsync",
    because="files are written by a format through a megackpt.storage.Store.",
    instead="Use save(); to write elsewhere pass a Store as checkpoint_dir.",
)
